# SPDX-License-Identifier: Apache-2.0
"""Every engine, head size and mask of attention over lengths, batches and ratios of heads."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.sdpa_gpu import CUDA, D_HEADS, ENGINES, check

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # a kernel compiles for some seconds

LENGTHS = (1, 2, 3, 127, 128, 129, 1000, 2177)
PAIRS = (
    (1, 1000),
    (129, 127),
    (1000, 2177),
    (127, 129),
    (2177, 1000),
    (3, 2),
    (128, 128),
    (1, 1),
    (200, 1),
)
"""S and Sk; rows see no key where S is the longer and the diagonal ends bottom-right."""
FORMS = {
    "causal": {"heads": (4, 2)},
    "full-gate": {"is_causal": False, "heads": (3, 1), "has_gate": True, "dtype": torch.float16},
    "full-no-lse": {"is_causal": False, "heads": (2, 2), "has_lse": False},
    "window-0": {"window_left": 0, "heads": (8, 1)},
    "window-1-gate": {"window_left": 1, "heads": (2, 1), "has_gate": True},
    "window-5": {"window_left": 5, "heads": (6, 2), "dtype": torch.float16},
    "window-wide": {"window_left": 5000, "heads": (4, 4)},
    "window-right": {"window_right": 3, "heads": (4, 2)},
    "full-left": {"is_causal": False, "window_left": 70, "heads": (3, 3)},
}
PAIRED_FORMS = {
    "bottom-right": {"causal_bottom_right": True, "heads": (4, 2)},
    "bottom-right-band": {
        "causal_bottom_right": True,
        "window_left": 37,
        "window_right": 4,
        "heads": (3, 1),
        "has_gate": True,
    },
    "top-left": {"heads": (1, 1), "dtype": torch.float16},
    "full": {"is_causal": False, "heads": (8, 1)},
}

engines = pytest.mark.parametrize("engine", ENGINES)
head_sizes = pytest.mark.parametrize("d_head", D_HEADS)


@engines
@head_sizes
@pytest.mark.parametrize("form", FORMS)
def test_lengths(form, d_head, engine):
    for i, s in enumerate(LENGTHS):
        check(engine, i % 3 + 1, s, d_head=d_head, **FORMS[form])


@engines
@head_sizes
@pytest.mark.parametrize("form", PAIRED_FORMS)
def test_keys_beside_rows(form, d_head, engine):
    for i, (s, sk) in enumerate(PAIRS):
        check(engine, i % 3 + 1, s, sk, d_head=d_head, **PAIRED_FORMS[form])


LENS = ((0, 1, 2), (1000, 999, 0), (500, 64, 63), (65, 128, 127), (-7, 1200, 1), (0, 0, 0))


@engines
@head_sizes
@pytest.mark.parametrize(
    "form",
    [
        {"heads": (4, 2)},
        {"heads": (2, 1), "causal_bottom_right": True, "has_gate": True},
        {"heads": (3, 1), "is_causal": False, "dtype": torch.float16},
        {"heads": (2, 2), "window_left": 33, "causal_bottom_right": True},
    ],
    ids=["causal", "bottom-right-gate", "full", "window"],
)
def test_lengths_of_entries(form, d_head, engine):
    for lens in LENS:
        check(engine, 3, 1000, d_head=d_head, seq_lens=lens, **form)
        check(engine, 3, 1, 1000, d_head=d_head, seq_lens=lens, **form)


@engines
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 1), (8, 1), (6, 2), (14, 2), (5, 5)])
def test_ratios_of_heads(heads, engine):
    """S21: also the ratios that a dispatch list would miss."""
    check(engine, 2, 300, heads=heads, d_head=128)


@engines
def test_a_plan_serves_no_batch_and_no_row(engine):
    """S29: an empty call launches nothing, and the next one is right."""
    for extents in ((0, 128, 128), (2, 0, 128), (0, 0, 0)):
        check(engine, *extents, heads=(4, 2), d_head=64)
    torch.cuda.synchronize()
    check(engine, 2, 128, heads=(4, 2), d_head=64)


@engines
@head_sizes
def test_the_longest_of_the_plan(d_head, engine):
    check(engine, 1, 8192, heads=(4, 2), d_head=d_head)


@pytest.mark.timeout(300)
@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes_past_2_31_elements(dtype, engine):
    """With a window of 0 a row is its own value: exact, and cheap to check at any size."""
    from cudnn_blocks import SdpaFwd, SdpaGeometry

    b, s, h_q, h_kv, d = 30, 8192, 16, 2, 256
    columns = (2 * h_q + 2 * h_kv) * d
    assert b * s * columns > 2**31
    slab = torch.empty(b, s, columns, dtype=dtype, device=CUDA)
    for entry in slab:
        entry.normal_()
    widths = [n * d for n in (h_q, h_q, h_kv, h_kv)]
    q, _, k, v = (x.unflatten(2, (-1, d)) for x in slab.split(widths, dim=2))
    o = torch.full((b, s, h_q, d), torch.nan, dtype=dtype, device=CUDA)
    geometry = SdpaGeometry(h_q, h_kv, d, window_left=0)
    plan = SdpaFwd(q, k, v, o, geometry, engines={"sdpa": engine})
    plan.compile()
    plan.execute(q, k, v, o)
    for entry in range(b):
        wanted = v[entry].repeat_interleave(h_q // h_kv, dim=1)
        assert torch.equal(o[entry], wanted), f"entry {entry}"
