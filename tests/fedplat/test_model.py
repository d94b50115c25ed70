"""The model of a job: seeded, loadable, freezable; what travels goes in and out without loss."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from fedplat.errors import UsageError
from fedplat.job import Job, validate_job
from fedplat.model import build_model, load_file, read_arrays, set_training, travelling_state, write_arrays
from fedplat.task import Examples, Task


class Network(Task):
    """Linear → BatchNorm → Linear: parameters and buffers."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def data(self, split: str) -> Examples:
        return Examples(torch.randn(8, 3), torch.zeros(8, dtype=torch.int64))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}


NAMES = set(Network().model().state_dict())


def job_of(seed: int = 0, **task: object) -> Job:
    return validate_job({"job": {"seed": seed}, "task": task}, "test")


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    return read_arrays(model.state_dict())


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def save(path: Path, **arrays: np.ndarray) -> Path:
    safetensors.numpy.save_file({name.replace("_0_", "0."): array for name, array in arrays.items()}, path)
    return path


def test_initialisation_depends_on_the_seed_and_nothing_else() -> None:
    first = weights(build_model(job_of(seed=1), Network()))
    torch.rand(17)
    assert same(weights(build_model(job_of(seed=1), Network())), first)
    assert not same(weights(build_model(job_of(seed=2), Network())), first)


def test_building_a_model_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    build_model(job_of(), Network())
    assert torch.equal(torch.get_rng_state(), before)


def test_init_from_loads_shared_names_and_keeps_fresh_values_elsewhere(tmp_path: Path) -> None:
    fresh = weights(build_model(job_of(), Network()))
    weight = np.full((4, 3), 7, np.float32)
    file = save(tmp_path / "m.safetensors", _0_weight=weight, _0_bias=np.zeros(99, np.float32), other=np.ones(2))
    loaded = weights(build_model(job_of(init_from=str(file)), Network()))
    assert np.array_equal(loaded["0.weight"], weight)
    assert same({**loaded, "0.weight": weight}, {**fresh, "0.weight": weight})


def test_saved_model_loads_back_bit_for_bit(tmp_path: Path) -> None:
    source = weights(build_model(job_of(seed=5), Network()))
    file = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(source, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert same(weights(build_model(job_of(init_from=str(file), init_sha256=digest), Network())), source)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_init_from_takes_any_float_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    file = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"0.weight": torch.full((4, 3), 1.5, dtype=dtype)}, file)
    model = build_model(job_of(init_from=str(file)), Network())
    assert torch.equal(model.state_dict()["0.weight"], torch.full((4, 3), 1.5))


def test_wrong_checksum_is_refused_with_both_values(tmp_path: Path) -> None:
    file = save(tmp_path / "m.safetensors", _0_weight=np.zeros((4, 3), np.float32))
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(UsageError, match=f"{found}, the job says {'0' * 64}"):
        build_model(job_of(init_from=str(file), init_sha256="0" * 64), Network())


@pytest.mark.parametrize(
    "content", [b"", b"not safetensors at all", b"\xff" * 64, (8).to_bytes(8, "little") + b"{}      x"]
)
def test_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"task\.init_from: .*m\.safetensors"):
        build_model(job_of(init_from=str(file)), Network())


def test_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "m.safetensors", _0_weight=np.zeros((4, 3), np.float32))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match="is not a safetensors file"):
        build_model(job_of(init_from=str(file)), Network())


def test_file_of_which_nothing_fits_is_refused_and_both_sides_named(tmp_path: Path) -> None:
    file = save(tmp_path / "m.safetensors", stranger=np.zeros(3), _0_weight=np.zeros((3, 4), np.float32))
    with pytest.raises(
        UsageError, match=r"no tensor of .* fits the model\. It has .*stranger.*the model has 0\.weight"
    ):
        build_model(job_of(init_from=str(file)), Network())


def test_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UsageError, match=r"task\.init_from: .* can't be read"):
            build_model(job_of(init_from=str(path)), Network())


def test_refused_file_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = Network().model()
    before = weights(model)
    with pytest.raises(UsageError):
        load_file(model, save(tmp_path / "m.safetensors", stranger=np.zeros(3)), None)
    assert same(weights(model), before)


@pytest.mark.parametrize(
    ("freeze", "travels"),
    [
        ([], NAMES),
        (["0.*"], NAMES - {"0.weight", "0.bias"}),
        (["1.*", "0.bias"], {"0.weight", "2.weight", "2.bias"}),
        (["*.bias"], {name for name in NAMES if not name.endswith("bias")}),
        (["1.running_*"], NAMES - {"1.running_mean", "1.running_var"}),
    ],
)
def test_frozen_tensors_neither_train_nor_travel(freeze: list[str], travels: set[str]) -> None:
    model = build_model(job_of(freeze=freeze), Network())
    assert set(travelling_state(model, tuple(freeze))) == travels
    assert {n for n, p in model.named_parameters() if p.requires_grad} == travels & set(dict(model.named_parameters()))


def test_pattern_that_matches_nothing_is_refused_and_lists_the_names() -> None:
    with pytest.raises(UsageError, match=r"'encoder\.\*' matches no parameter\. The model has: 0\.weight"):
        build_model(job_of(freeze=["0.*", "encoder.*"]), Network())


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(UsageError, match="leaves nothing to train"):
        build_model(job_of(freeze=["*"]), Network())


@pytest.mark.parametrize(
    "freeze", [("1.*",), ("1.running_mean", "1.running_var", "1.num_batches_tracked"), ("1.running_*",)]
)
def test_frozen_batch_norm_statistics_do_not_move_in_training_mode(freeze: tuple[str, ...]) -> None:
    model = build_model(job_of(freeze=list(freeze)), Network())
    frozen = NAMES - set(travelling_state(model, freeze))
    before = weights(model)
    set_training(model, freeze)
    model(torch.randn(16, 3) + 5)
    after = weights(model)
    assert all(np.array_equal(after[name], before[name]) for name in frozen)


def test_batch_norm_that_is_not_frozen_moves_in_training_mode() -> None:
    model = build_model(job_of(freeze=["0.*"]), Network())
    model.eval()
    set_training(model, ("0.*",))
    before = weights(model)
    model(torch.randn(16, 3) + 5)
    assert not np.array_equal(weights(model)["1.running_mean"], before["1.running_mean"])


def test_half_precision_weights_are_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"'weight' is torch\.bfloat16.*local\.precision = 'bf16'"):
        travelling_state(nn.Linear(2, 2, dtype=torch.bfloat16), ())


shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
dtypes = st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.bool_])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.tuples(dtypes, shapes).flatmap(lambda p: hnp.arrays(*p)), max_size=4))
def test_written_arrays_read_back_bit_for_bit(arrays: dict[str, np.ndarray]) -> None:
    state = {name: torch.zeros(a.shape, dtype=torch.from_numpy(a.copy()).dtype) for name, a in arrays.items()}
    write_arrays(state, arrays)
    found = read_arrays(state)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_arrays_that_were_read_are_copies() -> None:
    model = nn.Linear(2, 2)
    arrays = read_arrays(model.state_dict())
    before = arrays["weight"].copy()
    write_arrays(model.state_dict(), {name: array + 1 for name, array in arrays.items()})
    assert np.array_equal(arrays["weight"], before)
    assert np.array_equal(model.weight.detach().numpy(), before + 1)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"weight": np.zeros((2, 2))}, "bias"),
        ({"weight": np.zeros((2, 2)), "bias": np.zeros(2), "extra": np.zeros(1)}, "extra"),
        ({"weight": np.zeros((2, 2)), "bias": np.zeros((2, 1))}, "'bias' has shape"),
        ({"weight": np.zeros(4), "bias": np.zeros(2)}, "'weight' has shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_arrays(nn.Linear(2, 2).state_dict(), arrays)


def test_refused_arrays_leave_every_tensor_as_it_was() -> None:
    """Validate before you mutate: a bad last array must not leave the first ones written."""
    model = nn.Linear(2, 2)
    before = weights(model)
    with pytest.raises(ValueError, match="bias"):
        write_arrays(model.state_dict(), {"weight": np.full((2, 2), 9.0), "bias": np.zeros(7)})
    assert same(weights(model), before)
