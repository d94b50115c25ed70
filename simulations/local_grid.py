"""LocalGrid: a Flower Grid that runs a ClientApp in this process, one client after another.

A server program can't tell it from Flower's own. `push_messages` queues, `pull_messages` runs the next
queued client and returns its reply, so a server that takes replies one by one holds one at a time.
Works with any ClientApp. What a client puts into `Context.state` is kept for its next message.
"""

import itertools
import traceback
from collections.abc import Collection, Iterable, Mapping

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedplat.federation import client_name
from fedplat.flower import Config, become_server, empty_run, error_reply, new_context, private_copy, stamp

FIRST_NODE_ID = 1000
_run_ids = itertools.count(1)


class LocalGrid(Grid):
    """Virtual clients named client-0 … client-(n-1), with Flower's usual partition-id node config."""

    def __init__(self, client_app: ClientApp, num_clients: int, run_config: Mapping[str, bool | float | int | str]):
        self._client_app = client_app
        self._run = empty_run(next(_run_ids))
        self._run_config: Config = dict(run_config)
        self._num_clients = num_clients
        self._queue: dict[str, Message] = {}
        self._states: dict[int, RecordDict] = {}
        become_server(self._run.run_id)

    # --- Flower's Grid --------------------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        self._run = run
        become_server(run.run_id)

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return range(FIRST_NODE_ID, FIRST_NODE_ID + self._num_clients)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, name=self._name(node)) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message_id = stamp(message)
            self._queue[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the next queued message among those asked for."""
        wanted = message_ids if isinstance(message_ids, Collection) else set(message_ids)
        for message_id in self._queue:
            if message_id in wanted:
                return [self._deliver(self._queue.pop(message_id))]
        return []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [self._deliver(self._queue.pop(message_id)) for message_id in list(self.push_messages(messages))]

    # --- clients --------------------------------------------------------------------------------

    def _deliver(self, message: Message) -> Message:
        """Run the ClientApp on one message; an exception becomes an error reply, as in Flower."""
        node = message.metadata.dst_node_id
        if not FIRST_NODE_ID <= node < FIRST_NODE_ID + self._num_clients:
            return error_reply(message, f"node {node} is not connected")
        context = self._context(node)
        try:
            reply = self._client_app(private_copy(message), context)
        except Exception:
            reply = error_reply(message, traceback.format_exc())
        if context.state:
            self._states[node] = context.state
        stamp(reply)
        return reply

    def _context(self, node: int) -> Context:
        index = node - FIRST_NODE_ID
        node_config: Config = {"partition-id": index, "num-partitions": self._num_clients}
        context = new_context(self._run.run_id, node, node_config, dict(self._run_config))
        if node in self._states:
            context.state = self._states[node]
        return context

    @staticmethod
    def _name(node: int) -> str:
        return client_name(node - FIRST_NODE_ID)

    # --- client state, for checkpoints ----------------------------------------------------------

    def client_states(self) -> Mapping[str, RecordDict]:
        return {self._name(node): state for node, state in self._states.items()}

    def restore_client_states(self, states: Mapping[str, RecordDict]) -> None:
        names = {self._name(node): node for node in self.get_node_ids()}
        self._states = {names[name]: state for name, state in states.items()}
