"""Profiles of a table, by which the same people are told from others: how often each value occurs
in some of its columns.

The columns are single ones, pairs, groups of coarse ones, and the row without its number.

A row's mark changes with any column, and a column's with any row, so both are lost once a file
gains a column and a row. A profile's rows depend on its own columns only, and are counted value by
value. Of two data sets of different people with counts a and b of a value, and b's rows rho times
as many, `a b - (rho a (a - 1) + b (b - 1) / rho) / 2` is 0 or less on average: people match across
the two no more often than within them. Each person in both adds 1. Had the people been dealt to the
two at random, its variance given t = a + b would be t (t - 1) / 2. So a public value that everybody
has, such as an age, proves nothing, and many values that occur just as often in both, or rare ones
that occur in both, prove a lot.

Where a record is a person, there is a profile of who they are (PERSON): whoever's id is in both is
in both, whatever his rows hold. How many rows he has is not kept.

The rule takes people to be drawn independently. Record numbers are not, and are left out; nor are
ranks or designed experiments, which may be taken for the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

KEPT = 2000
"""Different values kept of a profile, about: of more, those whose codes begin with enough zero
bits, whatever the data set.
"""
SINGLES, PAIRED = (
    32,
    8,
    # columns that are profiles of their own, and those that are paired, by their number of
    # different values
)
# for each k up to LEVELS, GROUPS groups that each coarse column is in with probability 1 / 2^k
LEVELS = 3
GROUPS = 8
COARSE = 8  # a column is coarse if one value has at least one COARSEth of the rows
TELLING = 16  # a profile with fewer different values is not worth keeping
SURE = 4.5  # standard deviations by which matches must exceed those of people dealt at random
SINGLE, PAIR, CORE, GROUP, PERSON = range(5)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HEAD = struct.Struct(">BBI")


@dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """How often each value occurs. In memory marks are the values' codes; in a sketch they are
    keyed, after a byte with the code's zero bits.
    """

    kind: int
    level: int  # zero bits that each code begins with
    marks: np.ndarray  # uint64, sorted, different
    counts: np.ndarray

    def keyed(self, mark: Callable[[bytes], bytes]) -> Profile:
        kept = [
            int.from_bytes(mark(bytes([self.kind]) + code.tobytes())[:7], "big")
            for code in self.marks.astype("<u8")
        ]
        marks = np.array(kept, np.uint64) | (_zeros(self.marks) << np.uint64(56))
        order = np.argsort(marks)
        return Profile(self.kind, self.level, marks[order], self.counts[order])

    def packed(self) -> bytes:
        head = _HEAD.pack(self.kind, self.level, len(self.marks))
        return head + self.marks.astype(">u8").tobytes() + self.counts.astype(">u4").tobytes()

    def thinned(self, level: int) -> tuple[np.ndarray, np.ndarray]:
        stays = self.marks >> np.uint64(56) >= level
        return self.marks[stays], self.counts[stays].astype(float)

    def share(self, other: Profile) -> float:
        """About which share of the smaller one's people is in both, for keyed profiles; 0 if that
        may be chance. One id is one person, by no chance.
        """
        level = max(self.level, other.level)
        (mine, a), (theirs, b) = self.thinned(level), other.thinned(level)
        if self.kind == other.kind == PERSON:
            return len(np.intersect1d(mine, theirs)) / max(1, min(len(mine), len(theirs)))
        fewest = (
            SURE**2
        )  # no value adds more than 1 to the excess, nor one in both less than 1 to its variance
        if self.kind != other.kind or min(len(mine), len(theirs)) <= fewest:
            return 0.0
        at = np.minimum(np.searchsorted(theirs, mine), len(theirs) - 1)
        both = theirs[at] == mine
        if both.sum() <= fewest:
            return 0.0
        alone = np.ones(len(theirs), bool)
        alone[at[both]] = False
        a = np.concatenate([a, np.zeros(alone.sum())])
        b = np.concatenate([np.where(both, b[at], 0), b[alone]])
        rho = b.sum() / a.sum()
        weight = 1 / np.maximum(1, (a + b) / 2)
        excess = weight * (a * b - (rho * a * (a - 1) + b * (b - 1) / rho) / 2)
        total = np.maximum(
            excess, -8
        ).sum()  # a value that new rows have far more often is not to outweigh all the others
        spread = np.sqrt((weight**2 * (a + b) * (a + b - 1) / 2).sum())
        if total > SURE * spread:
            return float(min(1.0, total / min((weight * a).sum(), (weight * b).sum())))
        return 0.0

    def people(self) -> float:
        return float(self.counts.sum()) * 2**self.level

    def repeats(self) -> float:
        """The share of people who have their values in common with others of the same data set."""
        return 1 - float((self.counts == 1).sum() / self.counts.sum())

    def merged(self, other: Profile) -> Profile:
        level = max(self.level, other.level)
        (mine, a), (theirs, b) = self.thinned(level), other.thinned(level)
        marks = np.union1d(mine, theirs)
        counts = np.zeros(len(marks))
        counts[np.searchsorted(marks, mine)] = a
        at = np.searchsorted(marks, theirs)
        counts[at] = np.maximum(counts[at], b)
        return _thin(
            Profile(self.kind, level, marks, counts.astype(np.uint32)), marks >> np.uint64(56)
        )


def unpacked(content: bytes) -> list[Profile]:
    """ValueError unless these are packed profiles."""
    found = []
    place = 0
    while place < len(content):
        if len(content) < place + _HEAD.size:
            raise ValueError("cut short")
        kind, level, count = _HEAD.unpack_from(content, place)
        marks = np.frombuffer(content, ">u8", count, place + _HEAD.size).astype(np.uint64)
        counts = np.frombuffer(content, ">u4", count, place + _HEAD.size + 8 * count).astype(
            np.uint32
        )
        found.append(Profile(kind, level, marks, counts))
        place += _HEAD.size + 12 * count
    return found


def profiles_of(columns: list[np.ndarray]) -> list[Profile]:
    """The unkeyed profiles of a table that is given by its columns, in whatever order."""
    n = len(columns[0])
    core = np.zeros(n, np.uint64)
    groups = np.zeros((LEVELS * GROUPS, n), np.uint64)
    members: list[list[int]] = [[] for _ in groups]
    order: dict[int, tuple[int, int]] = {}
    for j, column in enumerate(columns):
        codes = _codes(column)
        found, counts = np.unique(codes, return_counts=True)
        if len(found) == 1 or _record_number(column, counts):
            continue
        order[j] = (
            -min(2 * len(found), n),
            int(found[0]),
        )  # of columns that all tell enough, any, but the same ones beside new columns
        core += codes
        most = int(counts.max())
        if most * COARSE >= n:
            told = splitmix(
                found[[counts.argmax()]] + np.uint64(COARSE * most // n)
            )  # what a column is known by, also after some new rows
            for group in np.flatnonzero(_drawn(told)):
                groups[group] += splitmix(codes ^ told)
                members[group].append(j)
    by_number = sorted(order, key=lambda j: order[j])
    paired = [j for j in by_number if -order[j][0] < n][:PAIRED]  # the others tell enough alone
    codes = {j: _codes(columns[j]) for j in {*by_number[:SINGLES], *paired}}
    wanted: list[tuple[int, np.ndarray]] = [(SINGLE, codes[j]) for j in by_number[:SINGLES]]
    wanted += [(PAIR, codes[i] + codes[j]) for k, i in enumerate(paired) for j in paired[k + 1 :]]
    wanted += [(CORE, core)]
    different = {tuple(inside): group for group, inside in enumerate(members) if len(inside) > 1}
    wanted += [(GROUP, groups[group]) for group in different.values()]
    return [profile for kind, values in wanted if (profile := _profile(kind, values))]


def persons_of(ids: Iterable[str]) -> Profile:
    """The unkeyed profile of persons, whose ids are in one spelling; whoever has none is known by
    nothing.
    """
    found = {hashlib.sha256(one.encode()).digest()[:8] for one in ids if one}
    codes = np.unique(np.frombuffer(b"".join(found), "<u8").astype(np.uint64))
    return _thin(Profile(PERSON, 0, codes, np.ones(len(codes), np.uint32)), _zeros(codes))


def _profile(kind: int, values: np.ndarray) -> Profile | None:
    codes, counts = np.unique(splitmix(values), return_counts=True)
    if len(codes) >= TELLING:
        return _thin(Profile(kind, 0, codes, counts.astype(np.uint32)), _zeros(codes))
    return None


def _thin(profile: Profile, zeros: np.ndarray) -> Profile:
    level = profile.level
    most = {CORE: 2 * KEPT, PERSON: 50 * KEPT}.get(
        profile.kind, KEPT
    )  # few of many persons may come back: their marks are kept as rows' are
    while (zeros >= level).sum() > most:
        level += 1
    stays = zeros >= level
    return Profile(profile.kind, level, profile.marks[stays], profile.counts[stays])


def exactly(columns: Iterable[np.ndarray]) -> bytes:
    """A digest of all cells in their order, to the last bit and letter: where `comparable`, made
    for recognition, takes two for one, this does not.
    """
    found = hashlib.sha256()
    for column in columns:
        plain = column.dtype.kind in "biufSUMm"
        if plain:
            content = np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
        else:
            content = "\n".join(map(repr, column.tolist())).encode()
        found.update(f"{column.dtype.str} {column.shape} {len(content)}\n".encode())
        found.update(content)
    return found.digest()


def comparable(values: np.ndarray) -> np.ndarray:
    """Integers as they are, since record numbers may be large, and others in single precision, as
    the gate uses them; float64.
    """
    exact = values.astype("<f8", order="C")
    with np.errstate(over="ignore"):
        exact = (
            np.where(exact == np.rint(exact), exact, exact.astype(np.float32)) + 0.0
        )  # -0 becomes 0
    exact[np.isnan(exact)] = np.nan  # one of the many
    return exact


def _codes(column: np.ndarray) -> np.ndarray:
    return splitmix(comparable(column).view(np.uint64))


def _record_number(column: np.ndarray, counts: np.ndarray) -> bool:
    """Whole numbers close together of which far fewer pairs are equal than if each were drawn by
    chance: another hospital has the same ones.
    """
    values = column.astype(np.float64)
    values = values[np.isfinite(values)]
    if len(values) == 0 or (values != np.rint(values)).any():
        return False
    low, high = np.quantile(values, [0.05, 0.95])
    width = (high - low) / 0.9 + 1
    by_chance = len(values) ** 2 / (2 * width)
    return bool(
        width <= 50 * len(values)
        and by_chance >= 5
        and (counts * (counts - 1.0)).sum() / 2 < by_chance / 4
    )


def _drawn(told: np.ndarray) -> np.ndarray:
    """Which groups a column is in: a function of what it is known by alone, so that an added column
    leaves most groups as they were.
    """
    draws = splitmix(told + np.arange(LEVELS * GROUPS, dtype=np.uint64)).reshape(LEVELS, GROUPS)
    return np.concatenate([draw >> np.uint64(63 - k) == 0 for k, draw in enumerate(draws)])


def splitmix(values: np.ndarray) -> np.ndarray:
    """SplitMix64: close numbers become far ones, the same on every machine and in every version."""
    z = values + GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _zeros(codes: np.ndarray) -> np.ndarray:
    """The zero bits that each code begins with, up to 53."""
    return (53 - np.frexp((codes >> np.uint64(11)).astype(np.float64))[1]).astype(np.uint64)


def by_chance(one: Profile, other: Profile) -> float:
    """About the share of the smaller one's people who, by chance, have their values in common with
    the larger one, were they others.

    As many as within the larger one, but no more than the smaller one's own repeats, generously
    counted, allow: copied rows are no chance.
    """
    small, large = sorted((one, other), key=Profile.people)
    repeated = small.repeats() * small.people()
    most = (repeated + 3 * repeated**0.5 + 9) / small.people()
    return min(large.repeats(), most * large.people() / small.people())


def merged(old: Iterable[Profile], new: Iterable[Profile], most: int) -> list[Profile]:
    """Every profile of both, those that are alike as one; of very many the oldest."""
    found = list(old)
    for profile in new:
        share, same = max(
            ((known.share(profile), k) for k, known in enumerate(found)), default=(0.0, 0)
        )
        if share > 0:
            found[same] = found[same].merged(profile)
        else:
            found.append(profile)
    return found[:most]
