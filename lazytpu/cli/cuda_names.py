"""``run --cuda``: the word ``cuda`` means the device, in the script and in the modules beside it.

What is read from their files is changed before it is compiled, as its author would by hand: ``torch.cuda`` becomes
``torch.tpu``, ``x.cuda()`` becomes ``x.tpu()``, ``"cuda:0"`` becomes ``"tpu:0"``.  Installed packages stay as they are.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

from lazytpu.config import config

_DEVICE = re.compile(r"^cuda(?=:?\d*$)|(?<=^torch\.)cuda(?=\.\w+$)")  # "cuda", "cuda:0", "torch.cuda.FloatTensor"
_ARGUMENT = re.compile(r"^((?:--?[\w.-]+=)?)cuda(?=$|:\d+$)")
_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


class _Renamed(ast.NodeTransformer):
    """Renames what means the device; a flag of the script's own, such as ``args.cuda``, keeps its name."""

    def __init__(self, tree: ast.Module) -> None:
        self.name = config.device_name
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
        self.torch = {alias.asname or alias.name for i in imports for alias in i.names if alias.name == "torch"}
        self.torch.add("torch")

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "is_cuda" or (node.attr == "cuda" and self._is_torch(node.value)):
            node.attr = node.attr.replace("cuda", self.name)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.func.attr = self.name
        by_name = isinstance(node.func, ast.Name) and node.func.id in _BY_NAME
        if by_name and node.args and not self._is_torch(node.args[0]):
            return node  # ``getattr(args, "cuda")``
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.slice, ast.Constant):  # ``settings["cuda"]``
            node.value = self.visit(node.value)
            return node
        return self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        node.values = [self.visit(value) for value in node.values]
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg == "dest" else self.generic_visit(node)  # an argument's name in ``args``

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            node.value = _DEVICE.sub(self.name, node.value)
        return node

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            alias.name = self._module(alias.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        node.module = node.module and self._module(node.module)
        for alias in node.names:
            if node.module == "torch" and alias.name == "cuda":
                alias.name, alias.asname = self.name, alias.asname or "cuda"
        return node

    def _is_torch(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.torch

    def _module(self, name: str) -> str:
        return f"torch.{self.name}{name[10:]}" if f"{name}.".startswith("torch.cuda.") else name


def compiled(source: bytes, path: str) -> CodeType:
    """Compile a file of the script's with the device in place of ``cuda``; lines and columns stay."""
    tree = ast.parse(source, path)
    return compile(_Renamed(tree).visit(tree), path, "exec", dont_inherit=True)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the file each time: Python's cache of compiled files has it as it is written."""
        path = self.get_filename(fullname)
        return compiled(self.get_data(path), path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules below the script's folder and the current one."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        origin = os.path.realpath(spec.origin)
        if not origin.startswith(self.folders) or {"site-packages", "dist-packages"} & {*origin.split(os.sep)}:
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec


def install(script: str) -> None:
    """Read the modules beside a script so, and its arguments: ``--device cuda``, ``--device=cuda:0``."""
    sys.meta_path.insert(0, _Finder([os.path.dirname(os.path.realpath(script)), os.getcwd()]))
    sys.argv[1:] = [_ARGUMENT.sub(rf"\g<1>{config.device_name}", argument) for argument in sys.argv[1:]]
