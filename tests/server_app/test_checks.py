"""Every way a reply can be wrong is refused with a reason that names it."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedplat import flower, wire
from fedplat.wire import Identity
from server_app.checks import Refused, allowed_examples, check_update

MODEL = {"w": np.zeros((2, 3), np.float32), "n": np.array(4, np.int64)}
EXPECTED = Identity("digest", 3, 1, "client-7")


def request() -> Message:
    flower.become_server(1)
    message = Message(RecordDict(), dst_node_id=1007, message_type="train")
    flower.stamp(message)
    return message


def content(**changes) -> RecordDict:
    arrays = changes.get("arrays", {"w": np.ones((2, 3), np.float32), "n": np.array(5, np.int64)})
    record = arrays if isinstance(arrays, ArrayRecord) else wire.encode_arrays(arrays)
    built = wire.reply_content(changes.get("identity", EXPECTED), 10, {"loss": 0.5}, record)
    if "metrics" in changes:
        built[wire.METRICS] = MetricRecord(changes["metrics"])
    for key, extra in changes.get("extra", {}).items():
        built[key] = extra
    for key in changes.get("without", ()):
        del built[key]
    return built


def check(reply_content: RecordDict, asked: Message | None = None):
    asked = asked or request()
    return check_update(
        Message(reply_content, reply_to=asked), asked, EXPECTED, MODEL, max_norm=100.0, examples=allowed_examples(10)
    )


def test_a_right_reply_passes_with_its_norm():
    update = check(content())
    assert update.num_examples == 10 and update.metrics == {"loss": 0.5}
    assert update.norm == pytest.approx(np.sqrt(6))


def bad(value: float) -> dict[str, np.ndarray]:
    w = np.ones((2, 3), np.float32)
    w[1, 2] = value
    return {"w": w, "n": np.array(5, np.int64)}


LIAR = ArrayRecord({"w": Array("float32", (2, 3), "numpy.ndarray", b"no npy"), "n": Array(np.array(5))})
SWAPPED = ArrayRecord({"w": Array(np.ones((2, 3), np.float32)), "n": Array(np.array(5))})
SWAPPED["w"] = Array("float32", (2, 3), "numpy.ndarray", Array(np.ones((9, 9), np.float32)).data)

CASES = {
    "another round": (content(identity=Identity("digest", 2, 1, "client-7")), "wrong round: 2, expected 3"),
    "another attempt": (content(identity=Identity("digest", 3, 2, "client-7")), "wrong attempt"),
    "another job": (content(identity=Identity("other", 3, 1, "client-7")), "wrong job"),
    "another client": (content(identity=Identity("digest", 3, 1, "client-8")), "wrong client"),
    "no identity": (content(without=[wire.IDENTITY]), "no 'identity'"),
    "identity of wrong type": (
        content(extra={wire.IDENTITY: ConfigRecord({"job": "digest", "round": "3", "attempt": 1, "client": ""})}),
        "whole numbers",
    ),
    "NaN": (content(arrays=bad(np.nan)), "NaN or infinite"),
    "infinity": (content(arrays=bad(np.inf)), "NaN or infinite"),
    "absurd norm": (content(arrays=bad(1e6)), "exceeds server.max_update_norm"),
    "overflowing norm": (content(arrays=bad(3e38)), "exceeds|infinite"),
    "wrong shape": (content(arrays={"w": np.ones((3, 2), np.float32), "n": np.array(5)}), r"'w' has shape \(3, 2\)"),
    "wrong dtype": (content(arrays={"w": np.ones((2, 3)), "n": np.array(5)}), "'w' is float64"),
    "missing array": (content(arrays={"w": np.ones((2, 3), np.float32)}), "names differ.*n"),
    "extra array": (content(arrays={**bad(0.0), "x": np.ones(1)}), "names differ.*x"),
    "two array records": (content(extra={"more": ArrayRecord()}), "one array record"),
    "no arrays": (content(without=[wire.ARRAYS]), "one array record"),
    "undecodable bytes": (content(arrays=LIAR), "can't be decoded"),
    "header lies about shape": (content(arrays=SWAPPED), r"has shape \(9, 9\)"),
    "zero examples": (content(metrics={"num-examples": 0, "loss": 1.0}), "num-examples"),
    "fractional examples": (content(metrics={"num-examples": 1.5, "loss": 1.0}), "num-examples"),
    "absurd examples": (content(metrics={"num-examples": 2**40, "loss": 1.0}), "num-examples"),
    "no examples": (content(metrics={"loss": 1.0}), "num-examples"),
    "NaN metric": (content(metrics={"num-examples": 3, "loss": float("nan")}), "'loss' is not a reasonable number"),
    "list metric": (content(metrics={"num-examples": 3, "loss": [1.0, 2.0]}), "'loss' is not a reasonable number"),
    "two metric records": (content(extra={"m2": MetricRecord({"a": 1})}), "one metric record"),
}


@pytest.mark.parametrize(("reply", "reason"), CASES.values(), ids=CASES.keys())
def test_a_wrong_reply_is_refused_with_its_reason(reply, reason):
    with pytest.raises(Refused, match=reason):
        check(reply)


def test_a_reply_from_another_node_is_refused():
    asked, other = request(), request()
    other.metadata.__dict__["_dst_node_id"] = 1008
    reply = Message(content(), reply_to=other)
    with pytest.raises(Refused, match="another node"):
        check_update(reply, asked, EXPECTED, MODEL, max_norm=100.0, examples=allowed_examples(10))
