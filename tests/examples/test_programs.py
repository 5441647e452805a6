"""Examples that are one program: they run, show what they claim, and write their figures."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name, folder):
    """What an example prints; its figure is there."""
    run = subprocess.run([sys.executable, EXAMPLES / name], cwd=folder, capture_output=True, text=True, check=True)
    assert (folder / name).with_suffix(".png").stat().st_size > 20_000
    return run.stdout


@pytest.mark.full
def test_a_stream_with_an_alarm_notices_the_change_soon(tmp_path):
    first, *alarms = printed("stream_with_alarm.py", tmp_path).splitlines()
    assert float(re.search(r"accuracy ([\d.]+)", first)[1]) > 0.84
    rows = [int(re.match(r"alarm at reading ([\d,]+) ", line)[1].replace(",", "")) for line in alarms]
    assert any(3000 < row < 3200 for row in rows)


@pytest.mark.full
def test_the_map_of_what_a_model_knows_tells_four_classes_apart(tmp_path):
    assert int(re.match(r"(\d+) % right", printed("uncertainty_map.py", tmp_path))[1]) > 95


def test_a_convolutional_vae_learns_two_classes_of_images(tmp_path, capsys):
    """A narrow one, and a few made-up images."""
    example = runpy.run_path(str(EXAMPLES / "cifar_vae.py"))
    source, make = torch.Generator().manual_seed(0), example["network"]
    made = {name: tuple(torch.rand(n, 3, 32, 32, generator=source) for n in (8, 2)) for name in ("plane", "car")}
    narrow = {"images": lambda rows: made, "network": lambda: make(width=2, latents=2)}
    example["main"].__globals__.update(narrow)
    out = tmp_path / "samples.png"
    example["main"](["--tasks", "2", "--epochs", "1", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("after plane: plane -")
    assert lines[1].startswith("after car: plane -")
    assert out.read_bytes().startswith(b"\x89PNG")
