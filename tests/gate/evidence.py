"""Evidence made by hand: a healthy run, to be broken in one place by each test."""

import dataclasses
import math

from harness.probe.facts import (
    Capture,
    ConfigKey,
    Evidence,
    Key,
    Load,
    Parameter,
    Place,
    Projection,
    Proposal,
    Serving,
)

PLACE = Place(pid=1, rank=0, world_size=1, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_rank=0)


def parameter(name, written=64, elements=64, filled=0, kind="parameter", aliases=()):
    return Parameter(
        name,
        kind,
        (8, 8),
        "torch.bfloat16",
        elements,
        written,
        filled,
        1,
        0,
        (name,),
        tuple(aliases),
        True,
        False,
        "same",
        "",
    )


def key(name, landed=("x",), offered=1, *, read=False, overwritten=False, shape=(8, 8)):
    size = 2 * math.prod(shape)
    taken = ((size, 0, 1, 0, size),) if landed else ()
    return Key(name, True, shape, "BF16", offered, tuple(landed), read, overwritten, size, taken)


def load(role, parameters, keys, rank=0, **changes):
    place = dataclasses.replace(PLACE, rank=rank)
    made = Load(role, place, f"/{role}", "Model", "Loader", True, "", 0.1, tuple(parameters), tuple(keys), ())
    return dataclasses.replace(made, **changes)


def capture(chunk, *layers, final_norm=False, exact=True):
    return Capture(chunk, tuple(layers), final_norm, exact, 0.0)


def proposal(width=768, projections=(768,), layers=((2,), (4,), (5,)), *, entered=4, decode=True, strays=()):
    captures = tuple(capture(number, *chunk) for number, chunk in enumerate(layers))
    return Proposal(5, width, tuple(projections), 4, (256,), entered, decode, captures, 5, tuple(strays))


def serving(proposals, **changes):
    made = Serving(
        PLACE,
        "v1",
        "EagleProposer",
        "Llama",
        "Eagle3",
        8,
        256,
        Projection("model.fc", 768, 256, "key"),
        (2, 4, 5),
        (2, 4, 5),
        tuple(proposals),
        1,
        (),
        (),
        True,
    )
    return dataclasses.replace(made, **changes)


def config(path, value=1, *, read=True):
    return ConfigKey(path, value, read, ("engine",) if read else (), ())


def evidence(**changes):
    made = Evidence(
        "vllm",
        "0.32.0",
        "/e/site/vllm",
        "/target",
        "/drafter",
        (
            load("target", [parameter("embed.weight"), parameter("lm_head.weight")], [key("embed"), key("lm_head")]),
            load("drafter", [parameter("model.fc.weight"), parameter("norm.weight")], [key("fc.weight"), key("norm")]),
        ),
        (serving([proposal(), proposal()]),),
        (config("hidden_size"), config("rms_norm_eps", 1e-5)),
        (),
    )
    return dataclasses.replace(made, **changes)
