"""Finds the roles that a chat template names: constants that its source compares with a message's role.

Reads the syntax tree, and runs nothing. A role that the template only writes does not count. Variables' scopes are
ignored: a constant counts even if it is compared with another variable that has the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jinja2 import nodes

UNNAMED_ROLES = ("observation",)  # GLM-4's template writes every role between <| and |>, and names none
ROLE = "role"
_IS_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", re.ASCII)
_TESTS = ("eq", "equalto", "==", "ne", "!=", "sameas", "in")


def named_roles(template: nodes.Template) -> frozenset[str]:
    """Returns the roles that the template names, in its spelling."""
    return frozenset(text for text in _RoleReader(template).compared() if _IS_ROLE.fullmatch(text))


class _RoleReader:
    """Follows roles and constants through assignments and the arguments of macros."""

    def __init__(self, template: nodes.Template) -> None:
        self._template = template
        self._values: dict[str, list[nodes.Node]] = {}  # variable -> the values that may be assigned to it
        for assign in template.find_all(nodes.Assign):
            if (name := _name(assign.target)) is not None:
                self._values.setdefault(name, []).append(assign.node)
        macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        for call in template.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and (macro := macros.get(call.node.name)) is not None:
                given = [(one.name, value) for one, value in zip(macro.args, call.args, strict=False)]
                for name, value in [*given, *((each.key, each.value) for each in call.kwargs)]:
                    self._values.setdefault(name, []).append(value)
        self._roles: set[str] = set()  # variables that may hold a role
        while found := {name for name, values in self._values.items() if any(map(self._is_role, values))} - self._roles:
            self._roles |= found

    def compared(self) -> Iterator[str]:
        for compare in self._template.find_all(nodes.Compare):
            left = compare.expr
            for operand in compare.ops:
                yield from self._of_pair(left, operand.op, operand.expr)
                left = operand.expr
        for test in self._template.find_all(nodes.Test):
            if test.name in _TESTS and test.args and self._is_role(test.node):
                yield from self._constants(test.args[0])
        for each in self._template.find_all((nodes.Getitem, nodes.Call)):
            if (table := self._table(each)) is not None:
                yield from self._constants(table)
        for select in self._template.find_all(nodes.Filter):
            match select.name, select.args:
                case "selectattr" | "rejectattr", [attribute, how, value]:
                    if _constant(attribute) == ROLE and _constant(how) in _TESTS:
                        yield from self._constants(value)

    def _of_pair(self, left: nodes.Expr, op: str, right: nodes.Expr) -> Iterator[str]:
        if op in ("eq", "ne"):
            for one, other in ((left, right), (right, left)):
                if self._is_role(one):
                    yield from self._constants(other)
        elif op in ("in", "notin"):
            if self._is_role(left) and _constant(right) is None:  # not `role in "some text"`
                yield from self._constants(right)
            elif _lists_roles(right):
                yield from self._constants(left)

    def _is_role(self, node: nodes.Node | None) -> bool:
        """Whether the value may be a message's role."""
        match node:
            case nodes.Getattr(attr=name):
                return name == ROLE or _name(node) in self._roles
            case nodes.Getitem(arg=arg):
                return _constant(arg) == ROLE
            case nodes.Call(node=nodes.Getattr(node=of, attr=name), args=args):
                return (name == "get" and bool(args) and _constant(args[0]) == ROLE) or self._is_role(of)
            case nodes.Filter(node=of):
                return self._is_role(of)
            case nodes.CondExpr(expr1=one, expr2=other) | nodes.Or(left=one, right=other):
                return self._is_role(one) or self._is_role(other)
            case nodes.Name(name=name):
                return name in self._roles
        return False

    def _table(self, node: nodes.Node) -> nodes.Expr | None:
        """Returns the object in which the expression looks up a role; None for any other expression."""
        match node:
            case nodes.Getitem(node=table, arg=key) if self._is_role(key):
                return table
            case nodes.Call(node=nodes.Getattr(node=table, attr="get"), args=[key, *_]) if self._is_role(key):
                return table
        return None

    def _constants(self, node: nodes.Node | None, depth: int = 4) -> Iterator[str]:
        """Yields the possible texts of an expression, or of its elements or keys."""
        match node:
            case nodes.Const(value=str() as text):
                yield text
            case nodes.List(items=items) | nodes.Tuple(items=items):
                for item in items:
                    yield from self._constants(item, depth)
            case nodes.Dict(items=pairs):
                for pair in pairs:
                    yield from self._constants(pair.key, depth)
            case nodes.CondExpr(expr1=one, expr2=other) | nodes.Add(left=one, right=other):
                yield from self._constants(one, depth)
                yield from self._constants(other, depth)
            case nodes.Name() | nodes.Getattr() if depth:
                for value in self._values.get(_name(node) or "", []):
                    yield from self._constants(value, depth - 1)


def _constant(node: nodes.Node) -> str | None:
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _name(node: nodes.Node) -> str | None:
    """Returns the name of a variable, or of a namespace's attribute."""
    match node:
        case nodes.Name(name=name):
            return str(name)
        case nodes.NSRef(name=name, attr=attr) | nodes.Getattr(node=nodes.Name(name=name), attr=attr):
            return f"{name}.{attr}"
    return None


def _lists_roles(node: nodes.Node | None) -> bool:
    """Whether the node lists the roles of all messages: `messages | map(attribute='role') | list`."""
    while isinstance(node, nodes.Filter):
        if node.name == "map" and any(
            each.key == "attribute" and _constant(each.value) == ROLE for each in node.kwargs
        ):
            return True
        node = node.node
    return False
