"""The parts of NVFlare and Flower that are not for others to use, and that are used here all the
same: which, what for, and whether they are there.

Each closes a hole, or stands in for a worker of the engine that would run what comes over the wire.
A version that was not tried may lack one, or call it no more: then nothing is started. What each is
checked by while it runs is in docs/deploy.md, "Engines by their front doors".
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from silodp.core.errors import BadInput

TRIED = {"nvflare": "2.9.0", "flwr": "1.41.0"}
"""The one version of each engine that all this was tried with."""
PUBLIC = (
    "nvflare.apis",
    "nvflare.lighter",
    "flwr.app",
    "flwr.clientapp",
    "flwr.serverapp",
)
"""What the engines' own documentation tells others to import."""
PRIVATE: dict[str, tuple[str, ...]] = {
    "nvflare": (
        "nvflare.private.fed.client.client_req_processors:ClientRequestProcessors.request_processors",
        "nvflare.fuel.utils.fobs.fobs:_decomposers",
        "nvflare.fuel.utils.fobs.fobs:_type_name_whitelist",
        "nvflare.fuel.utils.fobs.fobs:_dot_handlers",
        "nvflare.fuel.f3.cellnet.defs:Encoding.FOBS",
        "nvflare.fuel.f3.cellnet.defs:MessagePropKey.COMMON_NAME",
        "nvflare.fuel.f3.cellnet.defs:MessageHeaderKey.CONN_URL",
        "nvflare.fuel.f3.cellnet.defs:ReturnCode.UNAUTHENTICATED",
        "nvflare.fuel.f3.cellnet.core_cell:CoreCell.add_incoming_filter",
        "nvflare.fuel.f3.cellnet.core_cell:CoreCell._add_adhoc_connector",
        "nvflare.fuel.f3.cellnet.identity:is_mtls_connection",
        "nvflare.fuel.f3.cellnet.utils:make_reply",
        "nvflare.fuel.f3.comm_error:CommError",
        "nvflare.fuel.f3.drivers.driver_params:DriverParams",
        "nvflare.fuel.f3.sfm.conn_manager:ConnManager.update_endpoint",
        "nvflare.fuel.f3.sfm.conn_manager:ConnManager.process_frame_task",
        "nvflare.fuel.f3.sfm.conn_manager:SfmFrameReceiver.process_frame",
        "nvflare.fuel.f3.streaming.byte_streamer:ByteStreamer._ack_handler",
        "nvflare.fuel.f3.streaming.byte_streamer:ByteStreamer.tx_task_map",
        "nvflare.fuel.f3.drivers.socket_conn:MAX_FRAME_SIZE",
        "nvflare.fuel.f3.drivers.tcp_driver:TcpStreamServer",
        "nvflare.fuel.f3.streaming.blob_streamer:BlobHandler.handle_blob_cb",
        "nvflare.fuel.f3.streaming.blob_streamer:BlobHandler._run_blob_cb",
        "nvflare.fuel.f3.streaming.blob_streamer:BlobHandler._fail",
        "nvflare.fuel.f3.streaming.stream_const:StreamHeaderKey.PAYLOAD_ENCODING",
        "nvflare.fuel.f3.streaming.stream_types:StreamError",
        "nvflare.private.fed.server.server_engine:ServerEngine.disable_clients",
        "nvflare.private.fed.app.client.client_train:main",
        "nvflare.private.fed.app.server.server_train:main",
    ),
    "flwr": (
        "flwr.superlink.extensions:get_middleware",
        "flwr.superlink.main:create_app",
        "flwr.superlink.cli:flower_superlink",
        "flwr.superlink.grid:HttpGrid",
        "flwr.supernode.cli:flower_supernode",
        "flwr.supernode.start_client_internal:time",
        "flwr.supernode.runtime.run_clientapp:pull_task_input",
        "flwr.supernode.runtime.run_clientapp:push_message",
        "flwr.supernode.fleet_http_client:FleetHttpClient",
        "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor",
        "flwr.supercore.runtime:RuntimeHttpClient",
        "flwr.supercore.control:ControlHttpClient",
        "flwr.supercore.interceptors:RuntimeTokenHttpInterceptor",
        "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor",
        "flwr.supercore.interceptors:SuperExecAuthHttpInterceptor",
        "flwr.supercore.heartbeat:HeartbeatSender",
        "flwr.supercore.task_identity:TaskIdentity",
        "flwr.supercore.constant:TaskType",
        "flwr.supercore.inflatable.inflatable_utils:pull_objects",
        "flwr.supercore.inflatable.inflatable_utils:pull_and_inflate_object_from_tree",
        "flwr.common.serde:context_from_proto",
        "flwr.common.serde:run_from_proto",
        "flwr.common.constant:SubStatus",
        "flwr.cli.supernode.register:try_load_public_key",
        "flwr.proto.control_pb2:RegisterNodeRequest",
        "flwr.proto.control_pb2:UnregisterNodeRequest",
        "flwr.proto.control_pb2:ListNodesRequest",
        "flwr.proto.control_pb2:StartRunRequest",
        "flwr.proto.fab_pb2:Fab",
        "flwr.proto.fleet_pb2:DeactivateNodeRequest",
        "flwr.proto.runtime_pb2:AcquireTaskRequest",
        "flwr.proto.runtime_pb2:PullTaskInputRequest",
        "flwr.proto.runtime_pb2:PushTaskOutputRequest",
        "flwr.proto.runtime_pb2:SendTaskHeartbeatRequest",
    ),
}
"""MODULE:NAME of each. What hangs on an engine's objects at run time (its cell's commands, its
agent's processors) is looked at by `nvflare.app` itself.
"""


@cache
def check(engine: str) -> None:
    """BadInput unless the installed engine is the version that was tried, and has every part that
    is used of it.
    """
    try:
        found = version(engine)
    except PackageNotFoundError:
        raise BadInput(f"{engine} is not installed; install {engine}=={TRIED[engine]}") from None
    if found != TRIED[engine]:
        raise BadInput(
            f"{engine} {found} is installed, and silodp closes the holes of "
            f"{TRIED[engine]} alone; install {engine}=={TRIED[engine]}"
        )
    for part in PRIVATE[engine]:
        module, _, names = part.partition(":")
        try:
            here = import_module(module)
            for name in names.split("."):
                here = vars(here)[name]  # its own, and not what it inherits from an abstract class
        except (ImportError, KeyError):
            raise BadInput(
                f"{engine} {found} has no {part}, which silodp needs to close a hole; "
                f"install {engine}=={TRIED[engine]} anew"
            ) from None
