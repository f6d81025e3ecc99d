# SPDX-License-Identifier: Apache-2.0
"""Attention of e4m3 codes: the reference against FP64, and what the op accepts."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_blocks import ContractError, NotServedError, SdpaFwd, SdpaGeometry, TensorSpec, ops
from cudnn_blocks.reference.attention import AttentionMask, sdpa
from tests.helpers.sdpa_problem import CODES, make_problem, spec_plan
from tests.helpers.tensors import assert_same_bits
from tests.oracles.sdpa_reference import exact, visible_keys

torch.set_num_threads(1)
SCALE, DESCALE_V, SCALE_O = 0.25, 0.375, 24.0
MASKS = {
    "full": {"is_causal": False},
    "causal": {},
    "band": {"causal_bottom_right": True, "window_left": 4, "window_right": 1},
}


def codes(*shape, spread=1.0):
    return (spread * torch.randn(shape)).to(CODES)


def operands(s=7, sk=9, d=16):
    return codes(2, s, 2, d), codes(2, sk, 1, d), codes(2, sk, 1, d, spread=3.0)


def run(q, k, v, o_dtype=torch.bfloat16, gate=None, seq_lens=None, **mask):
    o = torch.zeros(q.shape).to(o_dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    lens = None if seq_lens is None else torch.tensor(seq_lens, dtype=torch.int32)
    sdpa(q, k, v, o, gate, lse, lens, SCALE, AttentionMask(**mask), DESCALE_V, SCALE_O)
    return o, lse


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_rounding_points_row_by_row(mask):
    """Weights of 256 at the maximum, rounded for the product and not in the sum, in FP64."""
    for s, sk in ((7, 9), (9, 7), (1, 5)):
        q, k, v = operands(s, sk)
        o, lse = run(q, k, v, **mask)
        _, wanted_lse = exact(q.float(), k.float(), v.float(), SCALE, None, **mask)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-5)
        for b, row, head in ((0, 0, 0), (1, s - 1, 1), (0, s // 2, 1)):
            keys = visible_keys(row, s, sk, **mask)
            if not keys:
                assert not o[b, row, head].any()
                continue
            scores = k[b, keys, 0].double() @ q[b, row, head].double() * SCALE
            weights = 256 * torch.exp(scores - scores.max())
            rounded = weights.float().to(CODES).double()
            wanted = rounded @ v[b, keys, 0].double() / weights.sum() * DESCALE_V
            error = (o[b, row, head].double() - wanted).abs()
            assert (error <= 2.0**-8 * wanted.abs() + 1e-6).all()


def test_one_visible_key_is_its_value():
    q, k, v = operands()
    o, _ = run(q, k, v)
    wanted = (v[:, :1].float() * DESCALE_V).bfloat16().expand_as(o[:, :1])
    assert_same_bits(o[:, :1], wanted, "the first row of a causal mask")


def test_the_result_becomes_codes_last():
    q, k, v = operands()
    gate = torch.randn(q.shape).bfloat16()
    o, lse = run(q, k, v, gate=gate)
    coded, coded_lse = run(q, k, v, CODES, gate)
    wanted = (o.float() * SCALE_O).clamp(-448, 448).to(CODES)
    assert_same_bits(coded, wanted, "o")
    assert_same_bits(coded_lse, lse, "lse")
    assert coded.float().abs().max() > 1.0


def test_codes_past_the_length_reach_nothing():
    q, k, v = operands()
    clean = run(q, k, v, seq_lens=[4, 0], is_causal=False)
    for code in (0x7F, 0xFF, 0x7E):
        for x in (k, v):
            x.view(torch.uint8)[0, 4:] = code
            x.view(torch.uint8)[1] = code
        dirty = run(q, k, v, seq_lens=[4, 0], is_causal=False)
        for name, a, b in zip(("o", "lse"), dirty, clean, strict=True):
            assert_same_bits(a, b, f"{name} {code:#x}")
    assert not clean[0][1].any()


def test_nan_codes_show_where_they_are_seen():
    q, k, v = operands()
    v.view(torch.uint8)[0, 3, 0, 5] = 0xFF
    o, lse = run(q, k, v)
    assert torch.isfinite(lse).all()
    assert torch.isnan(o[0, 3:, :, 5]).all()
    assert torch.isfinite(o[0, :3]).all()
    coded, _ = run(q, k, v, CODES)
    assert torch.isnan(coded[0, 3:, :, 5].float()).all()


def test_the_plan_applies_every_scale():
    problem = make_problem(dtype=CODES, o_dtype=CODES, has_gate=True, seq_lens=[5, 7])
    actual, expected = problem.clone().run(), problem.expected()
    for name in ("o", "lse"):
        assert_same_bits(actual[name], expected[name], name)
    plain = make_problem(dtype=CODES).with_(**{n: problem[n] for n in ("q", "k", "v")})
    assert not torch.equal(plain.run()["lse"], actual["lse"])  # lengths took part


def test_stages_read_their_scales_at_every_launch():
    problem = make_problem(dtype=CODES)
    plan = problem.compiled()
    first = problem.clone().run(plan)["o"]
    plan._stages[0].descale_v *= 2
    assert_same_bits(problem.clone().run(plan)["o"], first * 2, "o")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"descale_q": 0.0}, "descale_q"),
        ({"descale_k": -1.0}, "descale_k"),
        ({"descale_v": math.nan}, "descale_v"),
        ({"scale_o": math.inf}, "scale_o"),
        ({"scale_o": 2.0}, "scale_o"),
    ],
)
def test_scales_without_sense_or_codes(change, name):
    problem = make_problem(dtype=CODES)
    problem.scales.update(change)
    with pytest.raises(ContractError, match=rf"^{name}: expected"):
        problem.plan().check_support()


@pytest.mark.parametrize("name", ["descale_q", "descale_k", "descale_v", "scale_o"])
def test_scales_of_16_bit_operands(name):
    problem = make_problem()
    problem.scales[name] = 2.0
    with pytest.raises(ContractError, match=rf"^{name}: expected 1.0"):
        problem.plan().check_support()
    problem.scales[name] = "2"
    with pytest.raises(TypeError, match=name):
        problem.plan()


def test_operands_of_other_dtypes():
    problem = make_problem(dtype=CODES, has_gate=True)
    for name, dtype in (("k", torch.bfloat16), ("o", torch.float16), ("gate", CODES)):
        wrong = problem.with_(**{name: problem[name].to(dtype)})
        with pytest.raises(ContractError, match=rf"^{name}: expected dtype"):
            wrong.plan().check_support()
    e5m2 = problem.with_(q=problem["q"].to(torch.float8_e5m2))
    with pytest.raises(NotServedError, match="e5m2.*served: codes in torch.float8_e4m3fn"):
        e5m2.plan().check_support()
    with pytest.raises(ContractError, match="^q: expected dtype"):
        ops.sdpa_fwd(problem["q"], problem["k"], problem["v"])


def test_strides_of_codes_are_multiples_of_16():
    q = TensorSpec(CODES, (1, 4, 2, 64), (4 * 136, 136, 64, 1), torch.device("meta"))
    k, o = (TensorSpec.contiguous((1, 4, 2, 64), x) for x in (CODES, torch.bfloat16))
    with pytest.raises(ContractError, match="^q: expected strides.* multiples of 16"):
        SdpaFwd(q, k, k, o, SdpaGeometry(2, 2, 64), target="cpu").check_support()


def test_engines_and_their_workspace():
    for d_head in (64, 128, 256):
        sizes = {"b": 3, "s": 200, "sk": 300, "heads": (4, 2), "d_head": d_head, "dtype": CODES}
        hopper, portable = (spec_plan(**sizes, target=target) for target in ("sm_90a", "sm_80"))
        assert hopper.get_workspace_size() == 3 * 2 * d_head * 384
        assert portable.get_workspace_size() == 0
        assert "transposed" in hopper.describe()
        assert [plan._stages[0].engine for plan in (hopper, portable)] == ["hopper", "portable"]
    with pytest.raises(NotServedError, match="dtype=e4m3"):
        spec_plan(dtype=CODES, target="sm_90a", engines={"sdpa": "cudnn"}).check_support()


@pytest.mark.parametrize("engine", ["hopper", "portable"])
def test_what_has_run_is_said_of_its_own_dtype(engine):
    def status(dtype):
        plan = spec_plan(d_head=128, dtype=dtype, target="sm_90a", engines={"sdpa": engine})
        (stage,) = plan.probe().stages
        return stage.status

    assert status(torch.bfloat16).endswith("gated_attention_block.json")
    shown = {"hopper": "gated_attention_precision.json", "portable": "gpu_test.log"}
    assert status(CODES).endswith(shown[engine])
