# SPDX-License-Identifier: Apache-2.0
"""The contract page of the block says what the code says: fields, operands, stages, engines."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from cudnn_blocks import GatedAttentionBlockFwd, GatedAttentionGeometry
from cudnn_blocks.blocks.gated_attention_modes import MODES, Precision
from cudnn_blocks.geometry import ProjBlock
from cudnn_blocks.stages.stage import Stage
from tests.helpers.gated_attention_problem import KNOBS, make_problem

PAGE = (Path(__file__).parents[2] / "docs" / "gated_attention.md").read_text(encoding="utf-8")
NAMES = {"B": 2, "S": 5, "T": 9, "d_model": 128, "h_q": 4, "D": 64, "N": 768, "R": 16}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_field_of_the_geometry_with_its_default():
    rows = re.findall(r"^\| (`.*?) \| ([^|]*?) \|", section("Words and axes"), re.MULTILINE)
    stated = {}
    for names, default in rows[-9:]:
        for name in re.findall(r"`(\w+)`", names):
            stated[name] = default.split(":")[0].strip("` ")
    fields = dataclasses.fields(GatedAttentionGeometry)
    assert list(stated) == [field.name for field in fields]
    for field in fields:
        if field.default is not dataclasses.MISSING:
            expected = "1e-6" if field.name == "qk_norm_eps" else str(field.default)
            assert stated[field.name] == expected, field.name
    assert all(f"`{band.name}`" in section("Words and axes") for band in ProjBlock)


def test_operands_in_the_order_of_execute_with_their_shapes():
    rows = re.findall(
        r"^\| [\d-]+ \| (`.*?) \|(.*?)\|", section("Operands, in the order of `execute`"), re.M
    )
    names = [name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)]
    parameters = list(inspect.signature(GatedAttentionBlockFwd.execute).parameters)[1:]
    assert names == parameters
    problem = make_problem(batch=2, tokens=5, table_rows=9, seq_lens=[5, 5], has_lse=True)
    checked = 0
    for name, shape in ((re.findall(r"`(\w+)`", cell)[0], shape) for cell, shape in rows):
        found = re.match(r" `\[(.*?)\]`", shape)
        if found is None or name == "workspace":
            continue
        extents = [part.replace("h_q D", "h_q * D") for part in found[1].split(", ")]
        # The page is ours and holds plain arithmetic over the axes.
        stated = tuple(eval(part, {"__builtins__": {}}, NAMES) for part in extents)
        assert stated == tuple(problem[name].shape), name
        checked += 1
    assert checked == 9


def test_stages_of_each_knob():
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+) \|$", section("Knobs and stages"), re.MULTILINE)
    stated = [tuple(re.findall(r"`(\w+)`", stages)) for _, stages in rows]
    order = [(knobs["fuse_norm_rope"], knobs["fuse_gate"]) for knobs in KNOBS]
    slots = {knobs: MODES[Precision.ACTIVATION, *knobs].slots for knobs in order}
    assert sorted(stated) == sorted(slots.values())
    assert stated[0] == slots[False, False]
    assert stated[-1] == slots[True, True]


def test_stages_and_regions_of_each_precision():
    """Rows stand in the order of the modes: each precision, then its fused form."""
    pattern = re.compile(r"^\| ([^|]+) \| (`[^|]+) \|$", re.MULTILINE)
    quantised = [mode for (precision, *_), mode in MODES.items() if precision.value != "None"]
    _, modes = section("Precision modes").split("### Stages, in launch order")
    stages = [tuple(re.findall(r"`(\w+)`", cell)) for _, cell in pattern.findall(modes)]
    assert stages[:4] == [mode.slots for mode in quantised[:4]]
    assert stages[4:] == [quantised[5].slots]
    assert "those of MXFP8 with `quantize_fp4_o` for `quantize_o`" in modes
    _, regions = section("Workspace").split("| mode | regions |")
    stated = [tuple(re.findall(r"`(\w+)`", cell)) for _, cell in pattern.findall(regions)]
    assert stated == [mode.regions for mode in quantised]


def test_engines_of_each_stage():
    stated = {}
    for stages, engines, _ in re.findall(
        r"^\| (`[^|]+) \| ([^|]+) \| ([^|]+) \|$", section("Engines"), re.MULTILINE
    ):
        for stage in re.findall(r"`(\w+)`", stages):
            stated[stage] = re.findall(r"`(hopper|portable|cudnn|reference)`", engines)
    for knobs in KNOBS:
        plan = make_problem().plan(**knobs)
        plan.check_support()
        for stage in plan._stages:
            assert isinstance(stage, Stage)
            served = [row.engine for row in stage.rows]
            if stage.name == "qkv_gate_proj_norm_rope":
                served.remove("cudnn")  # a row of plain projections
            assert stated[stage.name] == served, stage.name
    plain = [mode for (precision, *_), mode in MODES.items() if precision is Precision.ACTIVATION]
    assert set(stated) == {name for mode in plain for name in mode.slots}


def test_the_worked_example_of_the_workspace():
    assert "`proj` at 0, `o` at 20480000, 28672000 bytes in all" in PAGE  # test_gated_..._layout
