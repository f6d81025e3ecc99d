# SPDX-License-Identifier: Apache-2.0
"""Probing a thousand configurations is quick: nothing is compiled, the CuTe DSL is not imported."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.unit.test_deploy_file import SMALLEST

NUM_CONFIGURATIONS = 1000
LIMIT_S = 5.0
"""Of CPU time: on an idle machine no less goes by."""

PROGRAM = """
import json, sys, time
import torch
sys.modules["cutlass"] = None  # whoever imports it fails
from cudnn_blocks.deploy import DeployFile
smallest, count = json.loads(sys.argv[1]), int(sys.argv[2])
plans = []
for i in range(-(-count // len(smallest))):
    plans += [{"op": op, "batch": 1 + i, **fields} for op, fields in smallest.items()]
requests = DeployFile.model_validate_json(json.dumps({"plans": plans[:count]})).plans
targets = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
start = time.process_time()
reports = [request.plan(targets[i % 4]).probe() for i, request in enumerate(requests)]
took_s = time.process_time() - start
print(json.dumps([took_s, len(set(map(repr, requests))), sum(map(bool, reports)),
                  sorted({one.op for one in reports})]))
"""


def test_a_thousand_configurations_over_all_ops():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(SMALLEST), str(NUM_CONFIGURATIONS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    took_s, distinct, served, ops = json.loads(done.stdout)
    assert (distinct, served, ops) == (NUM_CONFIGURATIONS, NUM_CONFIGURATIONS, sorted(SMALLEST))
    assert took_s < LIMIT_S
