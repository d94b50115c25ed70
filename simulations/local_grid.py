"""LocalGrid: a Flower Grid whose clients run on this machine.

A server program can't tell it from Flower's own. `push_messages` hands messages to an engine, `pull_messages`
returns what the engine has done, so a server that takes replies as they come holds few at a time.
Works with any ClientApp. What a client puts into `Context.state` is kept for its next message.
"""

import itertools
import time
from collections.abc import Collection, Iterable, Mapping

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedplat import wire
from fedplat.federation import client_name
from fedplat.flower import Config, become_server, empty_run, error_reply, new_context, stamp
from server_app.stack import UpdateStack
from simulations.engine import Accounted, Delivery, Done, Engine, SerialEngine

FIRST_NODE_ID = 1000
_run_ids = itertools.count(1)


class LocalGrid(Grid):
    """Virtual clients named client-0 … client-(n-1), with Flower's usual partition-id node config."""

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: Mapping[str, bool | float | int | str],
        engine: Engine | None = None,
    ) -> None:
        self._engine: Engine = engine if engine is not None else SerialEngine(client_app)
        self._run = empty_run(next(_run_ids))
        self._run_config: Config = dict(run_config)
        self._num_clients = num_clients
        self._sent: dict[str, Message] = {}
        self._ready: dict[str, Message] = {}
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
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return range(FIRST_NODE_ID, FIRST_NODE_ID + self._num_clients)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, name=self._name(node)) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(messages)
        deliveries = []
        for message in pushed:
            message_id = stamp(message)
            if self._is_connected(message.metadata.dst_node_id):
                self._sent[message_id] = message
                deliveries.append(Delivery(message, self._context(message.metadata.dst_node_id)))
            else:
                reason = f"node {message.metadata.dst_node_id} is not connected"
                self._ready[message_id] = error_reply(message, reason)
        self._engine.submit(deliveries)
        return [message.metadata.message_id for message in pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are done; waits a short while for the engine if none is."""
        wanted = message_ids if isinstance(message_ids, Collection) else set(message_ids)
        if not any(message_id in self._ready for message_id in wanted):
            for result in self._collect():
                self._ready.update(self._as_messages(result))
        found = [message_id for message_id in self._ready if message_id in wanted]
        return [self._ready.pop(message_id) for message_id in found]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        deadline = None if timeout is None else time.monotonic() + timeout
        pending = list(self.push_messages(messages))
        replies: dict[str, Message] = {}
        while len(replies) < len(pending) and not self.nothing_to_come(pending):
            for reply in self.pull_messages(pending):
                replies[reply.metadata.reply_to_message_id] = reply
            if deadline is not None and time.monotonic() >= deadline:
                break
        return [replies[message_id] for message_id in pending if message_id in replies]

    # --- beyond Flower's Grid: see server_app.stack -----------------------------------------------

    def pull_updates(self, message_ids: Collection[str]) -> list[Message | UpdateStack]:
        """Like `pull_messages`, with stacks left whole."""
        found = [message_id for message_id in self._ready if message_id in message_ids]
        if found:
            return [self._ready.pop(message_id) for message_id in found]
        arrived: list[Message | UpdateStack] = []
        for result in self._collect():
            if isinstance(result, UpdateStack) and all(message_id in message_ids for message_id in result.message_ids):
                self._forget(result)
                arrived.append(result)
            else:
                self._ready.update(self._as_messages(result))
        found = [message_id for message_id in self._ready if message_id in message_ids]
        return arrived + [self._ready.pop(message_id) for message_id in found]

    def nothing_to_come(self, message_ids: Collection[str]) -> bool:
        return self._engine.is_idle() and not any(message_id in self._ready for message_id in message_ids)

    def most_releases(self) -> int | None:
        """Training rounds that one client's privacy has paid for at most; None where nothing is accounted."""
        return self._engine.most_releases() if isinstance(self._engine, Accounted) else None

    def close(self) -> None:
        self._engine.close()

    # --- clients --------------------------------------------------------------------------------

    def _collect(self) -> list[Done | UpdateStack]:
        results = self._engine.collect()
        for result in results:
            if isinstance(result, Done) and result.delivery.context.state:
                self._states[result.delivery.context.node_id] = result.delivery.context.state
        return results

    def _as_messages(self, result: Done | UpdateStack) -> dict[str, Message]:
        if isinstance(result, Done):
            message_id = result.delivery.message_id
            self._sent.pop(message_id, None)
            stamp(result.reply)
            return {message_id: result.reply}
        messages = {}
        for row, message_id in enumerate(result.message_ids):
            arrays = wire.encode_arrays(result.row_arrays(row))
            content = wire.reply_content(
                result.identities[row], result.num_examples[row], result.row_metrics(row), arrays
            )
            messages[message_id] = Message(content, reply_to=self._sent.pop(message_id))
            stamp(messages[message_id])
        return messages

    def _forget(self, stack: UpdateStack) -> None:
        for message_id in stack.message_ids:
            self._sent.pop(message_id, None)

    def _is_connected(self, node: int) -> bool:
        return FIRST_NODE_ID <= node < FIRST_NODE_ID + self._num_clients

    def _context(self, node: int) -> Context:
        node_config: Config = {
            "partition-id": node - FIRST_NODE_ID,
            "num-partitions": self._num_clients,
            wire.SIMULATED: True,
        }
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
