"""Running a test's function in a process that has fake CUDA devices: its return value comes back as
JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from disttrain_cli.runtime.dryrun.shim import environment

_CALL = """
import importlib, json, os, sys
from disttrain_cli.runtime.dryrun.device import pretend
function = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
with pretend():
    result = function(*json.loads(sys.argv[3]))
print("result:", json.dumps(result), flush=True)
os._exit(0)  # see `pretend`
"""


def on_fake_cuda(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a module's function returns there; it and its arguments must be JSON's."""
    if torch.backends.cuda.is_built():
        pytest.skip("fake CUDA devices want PyTorch's CPU build")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _CALL,
            function.__module__,
            function.__name__,
            json.dumps(arguments),
        ],
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("result: ")[-1])
