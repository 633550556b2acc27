"""For lines of the program that make views alone: the ops that these became.

A view is recorded by what reads it, at that line; so the line that made it has no op of its own.  Which line reads
it is found in the source, by following the names that the line assigns; which of the ops are its views, by their kind.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHAPES = "view _unsafe_view _reshape_alias"
_ONES = f"{_SHAPES} expand squeeze unsqueeze"
_ORDERS = "permute transpose t numpy_T movedim swapaxes"
_PARTS = "slice select split split_with_sizes chunk unbind narrow as_strided alias unsqueeze tensor_split"
# Method, function or property of torch to the aten ops that its views may be.
_BECOMES = {
    **dict.fromkeys("view reshape flatten unflatten ravel view_as reshape_as".split(), _SHAPES),
    **dict.fromkeys("expand expand_as broadcast_to squeeze unsqueeze atleast_1d atleast_2d atleast_3d".split(), _ONES),
    **dict.fromkeys("permute transpose t T mT H mH movedim moveaxis swapaxes swapdims adjoint".split(), _ORDERS),
    **dict.fromkeys("split chunk unbind select narrow tensor_split hsplit vsplit dsplit".split(), _PARTS),
    "[]": _PARTS,
    "diagonal": "diagonal",
    "unfold": "unfold",
    "as_strided": "as_strided",
    "real": "view_as_real select real",
    "imag": "view_as_real select imag",
    "conj": "_conj",
    "view_as_real": "view_as_real",
    "view_as_complex": "view_as_complex",
}
_BODIES = ("body", "handlers", "orelse", "finalbody", "cases")
_MAX_CALLS = 4  # of functions, that a view is followed out of

Ops = Sequence[Mapping[str, Any]]


def readers(source: str, file: str, ops: Ops) -> dict[int, list[int]]:
    """Line that makes views, and has no op, to the positions of the ops that these became.

    Args:
        source: text of the file.
        file: path of the file, as the ops have it.
        ops: of one graph, as `collect.graph_part` has them.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    by_line: dict[int, list[int]] = {}
    for position, op in enumerate(ops):
        if op["file"] == file:
            by_line.setdefault(op["line"], []).append(position)
    return _Readers(tree, by_line, file, ops).all()


@dataclass(slots=True)
class _Piece:
    """A simple statement, or the head of one with a body.

    Attributes:
        first, last: its lines.
        loads, stores: names, and attributes of names, that it uses and assigns.
        calls: names of the functions and methods it calls.
        leaves: whether it gives its value to whoever called the function.
    """

    first: int
    last: int
    loads: set[str]
    stores: set[str]
    calls: set[str]
    leaves: bool


class _Readers:
    def __init__(self, tree: ast.Module, by_line: dict[int, list[int]], file: str, ops: Ops) -> None:
        self.by_line, self.file, self.ops = by_line, file, ops
        self.functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self.scopes = [(scope, list(_pieces(scope.body))) for scope in (tree, *self.functions)]
        self.views = _views_of_lines(tree)
        self.called_as = _names_of_calls(tree, self.functions)
        self.maker = {name: i for i, op in enumerate(ops) for name, _ in op["results"]}

    def all(self) -> dict[int, list[int]]:
        found = {}
        for scope, pieces in self.scopes:
            for at, piece in enumerate(pieces):
                by_calls = self._made_by_calls(piece)
                for line in range(piece.first, piece.last + 1):
                    named = self.views.get(line, set()) | by_calls
                    kinds = {kind for name in named for kind in _BECOMES[name].split()}
                    if kinds and line not in self.by_line:
                        ops = self._of_piece(piece, kinds) + self._after(scope, pieces, at, kinds, _MAX_CALLS)
                        found[line] = self._likest(list(dict.fromkeys(ops)), named)
        return {line: ops for line, ops in found.items() if ops}

    def _made_by_calls(self, piece: _Piece) -> set[str]:
        """What makes views in functions that a piece calls and that do nothing else."""
        found: set[str] = set()
        for function in self.functions:
            lines = range(function.lineno, (function.end_lineno or 0) + 1)
            if self.called_as[function] & piece.calls and not any(line in self.by_line for line in lines):
                found.update(*[self.views.get(line, ()) for line in lines])
        return found

    def _likest(self, ops: list[int], named: set[str]) -> list[int]:
        """Those of the forward pass, if there are such, and of them those that are called as the line calls them."""
        forward = [i for i in ops if not self.ops[i]["backward"]] or ops
        return [i for i in forward if _kind(self.ops[i]) in named] or forward

    def _of_piece(self, piece: _Piece, kinds: set[str]) -> list[int]:
        lines = range(piece.first, piece.last + 1)
        return [i for line in lines for i in self.by_line.get(line, ()) if _kind(self.ops[i]) in kinds]

    def _after(self, scope: Any, pieces: list[_Piece], at: int, kinds: set[str], calls: int) -> list[int]:
        """What reads, further down, what a piece assigns; or what the function's callers do with it."""
        found: dict[int, None] = {}
        wanted = set(pieces[at].stores)
        leaves = pieces[at].leaves
        for piece in pieces[at + 1 :]:
            reads = bool(piece.loads & wanted)
            own = any(line in self.by_line for line in range(piece.first, piece.last + 1))
            if reads:
                found |= dict.fromkeys(self._of_piece(piece, kinds))
                leaves = leaves or piece.leaves and not own
            wanted = wanted | piece.stores if reads and not own else wanted - piece.stores
        if leaves and not found and scope in self.functions and calls:
            found |= dict.fromkeys(self._by_callers(scope, kinds, calls) or self._of_results(scope, kinds))
        return list(found)

    def _by_callers(self, function: Any, kinds: set[str], calls: int) -> Iterator[int] | list[int]:
        found: dict[int, None] = {}
        for scope, pieces in self.scopes:
            for at, piece in enumerate(pieces):
                if self.called_as[function] & piece.calls and scope is not function:
                    mine = self._of_piece(piece, kinds) or self._after(scope, pieces, at, kinds, calls - 1)
                    found |= dict.fromkeys(mine)
        return list(found)

    def _of_results(self, function: Any, kinds: set[str]) -> list[int]:
        """Views, recorded elsewhere, of what was computed in a function that something else than its name calls."""

        def inside(op: Mapping[str, Any]) -> bool:
            return bool(op["file"] == self.file and function.lineno <= op["line"] <= function.end_lineno)

        views: list[int] = []
        for position, op in enumerate(self.ops):
            if not inside(op) and not op["backward"] and not op["bytes"]:
                above = self.maker.get(op["operands"][0]) if op["operands"] else None
                if above is not None and (inside(self.ops[above]) or above in views):
                    views.append(position)
        return [i for i in views if _kind(self.ops[i]) in kinds]


def _kind(op: Mapping[str, Any]) -> str:
    return str(op["op"]).split(".")[1] if "." in op["op"] else ""


def _pieces(body: Iterable[ast.stmt]) -> Iterator[_Piece]:
    """The statements of a function in order, without those of functions in it."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        below = [part for name in _BODIES for part in _part(statement, name)]
        if not below:
            yield _piece([statement], statement.lineno, statement.end_lineno or 0, statement)
            continue
        heads = [n for n in ast.iter_child_nodes(statement) if n not in below]
        if heads:
            last = max(getattr(n, "end_lineno", 0) or 0 for n in heads)
            yield _piece(heads, statement.lineno, max(last, statement.lineno), statement)
        for part in below:
            yield from _pieces([part] if isinstance(part, ast.stmt) else part.body)


def _part(statement: ast.stmt, name: str) -> list[Any]:
    found = getattr(statement, name, [])
    return found if isinstance(found, list) else []


def _piece(nodes: Iterable[ast.AST], first: int, last: int, statement: ast.stmt) -> _Piece:
    made = _Piece(first, last, set(), set(), set(), isinstance(statement, ast.Return))
    for node in (n for top in nodes for n in ast.walk(top)):
        if isinstance(node, ast.Call):
            made.calls.add(_called(node))
        name = node.id if isinstance(node, ast.Name) else ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if name:
            context = getattr(node, "ctx", None)
            (made.stores if isinstance(context, ast.Store) else made.loads).add(name)
        made.leaves = made.leaves or isinstance(node, (ast.Yield, ast.YieldFrom))
    return made


def _is_size(node: ast.expr) -> bool:
    """Whether an expression is the shape of a tensor."""
    asked = node.func if isinstance(node, ast.Call) else node
    return isinstance(asked, ast.Attribute) and asked.attr in ("shape", "size", "stride")


def _names_of_calls(tree: ast.Module, functions: Iterable[Any]) -> dict[Any, set[str]]:
    """Function to the names it is called by: its own, or, for ``forward``, those that modules of its class have."""
    modules: dict[str, set[str]] = {}
    owner: dict[Any, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            owner |= dict.fromkeys(node.body, node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names = {getattr(t, "attr", getattr(t, "id", "")) for t in node.targets}
            modules.setdefault(_called(node.value), set()).update(names)
    return {f: modules.get(owner.get(f, ""), set()) if f.name == "forward" else {f.name} for f in functions}


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _views_of_lines(tree: ast.Module) -> dict[int, set[str]]:
    """Line to what makes views in it, as `_BECOMES` names it."""
    found: dict[int, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _BECOMES:
            found.setdefault(node.end_lineno or 0, set()).add(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and not _is_size(node.value):
            found.setdefault(node.end_lineno or 0, set()).add("[]")
    return found
