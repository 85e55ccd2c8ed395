"""A daemon's log tells when a reply was sent, and not when it was ready."""

from silodp.host.log import Log, tally


def test_a_line_is_in_the_log_once_its_reply_was_sent_and_not_when_it_was_ready(tmp_path):
    path = tmp_path / "log"
    log = Log(str(path), 10**6)
    log.line("started", at_once=True)
    before = path.read_bytes(), path.stat().st_mtime_ns
    log.line("answered   Grad")
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    log.sent()
    assert tally(str(path)) == {"started": 1, "answered": 1}
    log.line("late       1 since the start")
    log.close()
    assert tally(str(path))["late"] == 1, "what a stop finds unsent is written"
