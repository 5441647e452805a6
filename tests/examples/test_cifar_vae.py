"""The convolutional VAE of examples/cifar_vae.py, on a few made-up images."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent


def test_a_convolutional_model_learns_two_classes(tmp_path, monkeypatch, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "cifar_vae.py"))
    source = torch.Generator().manual_seed(0)
    made = {name: tuple(torch.rand(n, 3, 32, 32, generator=source) for n in (8, 2)) for name in ("plane", "car")}
    example["main"].__globals__.update(images=lambda rows: made, network=lambda: small(example))
    out = tmp_path / "samples.png"
    example["main"](["--tasks", "2", "--epochs", "1", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("after plane: plane -")
    assert lines[1].startswith("after car: plane -")
    assert out.read_bytes().startswith(b"\x89PNG")


def small(example):
    """The same network, narrow."""
    make = example["network"]
    return make(width=2, latents=2)
