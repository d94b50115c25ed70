"""What the site's link knows of Flower's fleet API: which calls go by, and what two of them say."""

from flwr.proto.fleet_pb2 import ActivateNodeResponse, DeactivateNodeRequest
from google.protobuf.message import DecodeError

PULL_MESSAGES, PULL_OBJECT = "/v1/fleet/pull-messages", "/v1/fleet/pull-object"
HEARTBEAT = "/v1/fleet/send-node-heartbeat"
ACTIVATE, DEACTIVATE = "/v1/fleet/activate-node", "/v1/fleet/deactivate-node"
STILL_ACTIVE = 412
"""What a SuperLink answers to the activation of a node that it believes to be there."""


def activated_node(content: bytes) -> int:
    """The node's id, out of the answer to an activation."""
    try:
        return int(ActivateNodeResponse.FromString(content).node_id)
    except DecodeError:
        return 0


def deactivation(node_id: int) -> bytes:
    return bytes(DeactivateNodeRequest(node_id=node_id).SerializeToString())
