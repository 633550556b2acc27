"""`run --cuda`: the word ``cuda`` means the device, and a script's own flags of that name stay."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lazytpu.cli.cuda_names import _Renamed
from tests.support.processes import run_lazytpu

CHANGED = {
    "import torch.cuda.amp as amp": "import torch.tpu.amp as amp",
    "from torch.cuda.amp import autocast": "from torch.tpu.amp import autocast",
    "from torch import cuda, nn": "from torch import tpu as cuda, nn",
    "import torch as th\nth.cuda.is_available()": "import torch as th\nth.tpu.is_available()",
    "model.net.cuda(0, non_blocking=True)": "model.net.tpu(0, non_blocking=True)",
    "x.to('cuda' if torch.cuda.is_available() else 'cpu')": "x.to('tpu' if torch.tpu.is_available() else 'cpu')",
    "torch.device(f'cuda:{rank}')": "torch.device(f'tpu:{rank}')",
    "torch.set_default_tensor_type('torch.cuda.FloatTensor')": "torch.set_default_tensor_type('torch.tpu.FloatTensor')",
    "assert x.is_cuda and x.device.type == 'cuda'": "assert x.is_tpu and x.device.type == 'tpu'",
    "hasattr(torch, 'cuda')": "hasattr(torch, 'tpu')",
}
KEPT = [
    "if args.cuda:\n    pass",
    "add('--no-cuda', dest='cuda', help='cuda or not')",
    "getattr(args, 'cuda')",
    "settings = {'cuda': True}\nsettings['cuda']",
    "torch.backends.cuda.matmul.allow_tf32 = torch.version.cuda is None",
    "'cuda:all'",
    "from cuda import nvrtc",
]


@pytest.mark.parametrize(("written", "read"), [*CHANGED.items(), *((text, text) for text in KEPT)])
def test_what_means_the_device_is_renamed(written: str, read: str) -> None:
    tree = ast.parse(written)
    assert ast.unparse(_Renamed(tree).visit(tree)) == ast.unparse(ast.parse(read))


def test_a_script_for_cuda_runs_with_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 1).cuda()\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse, net, torch\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--device', choices=['cuda:0', 'cpu'])\n"
        "args = parser.parse_args()\n"
        "args.cuda = torch.cuda.is_available()\n"
        "made = torch.cuda.FloatTensor([[1, 2]])\n"
        "print(args.cuda, args.device, net.make()(made).device, made.is_cuda)\n"
        "torch.ones(2, device=args.device) @ made\n"
    )
    done = run_lazytpu("run", "--cuda", script, "--device=cuda:0", cwd=tmp_path)
    assert done.stdout == "True tpu:0 tpu:0 True\n"
    assert f'{script}", line 8' in done.stderr and "torch.ones(2, device=args.device) @ made" in done.stderr
    assert done.returncode == 1 and "RuntimeError" in done.stderr
