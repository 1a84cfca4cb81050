"""Every pair of dialects: what comes out equals the canary that was built in that dialect, and the way back."""

import functools
import os

import pytest

from harness.canary.dialects import DIALECTS, read_drafter_config
from harness.convert.drafter import STAMP
from harness.convert.plan import TARGETS
from harness.errors import UsageError
from tests.convert.support import OPTIONS, config_of, convert, held, write_drafter, write_target

NAMED_AS = {"sglang": "specforge", "vllm": "speculators"}
"""Engine -> the dialect whose tensor names convert writes for it."""
LOSES = {
    ("norm-before-residual", "sglang"): "norm_before_residual",
    ("attention-bias", "sglang"): "attention_bias",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a function from dialect and option to a drafter's folder."""

    @functools.cache
    def build(dialect, option):
        return write_drafter(tmp_path_factory.mktemp("built") / "drafter", dialect, **OPTIONS[option])

    return build


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture
def to(tmp_path, target, monkeypatch):
    """Return a function that converts into a new folder and accepts the loss of t2d, where there is one."""
    count = iter(range(1000))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of them wait for the disk, and nothing here is about it

    def run(source, dialect, **more):
        lossy = ["t2d"] if dialect == "modelopt" and "t2d" in held(source) else []
        if STAMP not in config_of(source):
            more.setdefault("aux_ids_are", "inputs")
        return convert(source, tmp_path / str(next(count)), dialect, lossy=lossy, target=target, **more)

    return run


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("to_dialect", TARGETS)
@pytest.mark.parametrize("from_dialect", DIALECTS)
def test_it_equals_what_was_built_in_that_dialect(built, to, from_dialect, to_dialect, option):
    source = built(from_dialect, option)
    if lost := LOSES.get((option, to_dialect)):
        with pytest.raises(UsageError, match=f"would lose {lost}"):
            to(source, to_dialect)
        return
    made = to(source, to_dialect)
    wanted = held(built(NAMED_AS.get(to_dialect, to_dialect), option))
    if from_dialect == "modelopt" and to_dialect in NAMED_AS:
        wanted.pop("t2d", None)  # no engine reads it; trainers get one that is made from d2t
    assert held(made) == wanted
    read, origin = read_drafter_config(made), read_drafter_config(source)
    if origin.aux_layers and TARGETS[to_dialect].ids[1] == "outputs":
        origin = origin.__class__(**{**vars(origin), "aux_layers": tuple(i - 1 for i in origin.aux_layers)})
    assert read == origin
    assert config_of(made)["architectures"] == [TARGETS[to_dialect].architectures["llama"]]


@pytest.mark.parametrize(
    ("between", "option"), [(to, option) for to in TARGETS for option in OPTIONS if (option, to) not in LOSES]
)
@pytest.mark.parametrize("dialect", ["speculators", "specforge", "modelopt"])
def test_there_and_back(built, to, dialect, between, option):
    source = built(dialect, option)
    back = to(to(source, between), dialect)
    assert held(back) == held(source)
    if dialect == "speculators":
        assert config_of(back) == config_of(source)
    else:
        # Layer ids are said as the dialect has them, whatever the source counted.
        assert without_stamp(back) == without_stamp(to(source, dialect))


@pytest.mark.parametrize("option", ["aux-layers", "norm-before-fc"])
@pytest.mark.parametrize("first", TARGETS)
@pytest.mark.parametrize("second", TARGETS)
def test_a_detour_changes_nothing(built, to, first, second, option):
    for dialect in ("yuhuili", "speculators"):
        source = built(dialect, option)
        direct, detour = to(source, second), to(to(source, first), second)
        expected = held(direct)
        if first == "modelopt" and second in NAMED_AS:
            del expected["t2d"]
        assert held(detour) == expected
        assert without_stamp(detour) == without_stamp(direct)


def without_stamp(folder):
    return {key: value for key, value in config_of(folder).items() if key not in (STAMP, "speculators_config")}
