"""Which list of a target's modules is its decoder's layers. The forward itself needs torch: tests/engine."""

import types

import pytest

from harness.parity.plain_forward import decoder_layers


class Module:
    def __init__(self, *children):
        self._children = children

    def children(self):
        return iter(self._children)

    def modules(self):
        yield self
        for child in self._children:
            yield from child.modules()


class ModuleList(Module):
    def __len__(self):
        return len(self._children)


class Model(Module):
    def __init__(self, embedding, *children):
        super().__init__(*children)
        self._embedding = embedding

    def get_input_embeddings(self):
        return self._embedding


TORCH = types.SimpleNamespace(nn=types.SimpleNamespace(ModuleList=ModuleList))


def test_more_experts_than_layers():
    layers = ModuleList(*(Module(ModuleList(*(Module() for _ in range(8)))) for _ in range(2)))
    encoder = ModuleList(*(Module() for _ in range(12)))
    embedding = Module()
    found = decoder_layers(TORCH, Model(embedding, Module(Module(encoder), Module(embedding, layers)), Module()))
    assert found is layers


def test_a_model_without_layers_is_refused():
    embedding = Module()
    with pytest.raises(SystemExit, match="Model has no list of layers"):
        decoder_layers(TORCH, Model(embedding, Module(embedding)))
