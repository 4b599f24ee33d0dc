"""Damaged rank tables: a RankTableError at the right field, and never another exception."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable_tools import generate, load_global
from ranktable_tools.schema import RankTableError, parse_global

TABLE = generate(
    prefill=[[4, 5]], decode=[[6, 7]], api_server=True, server_ip="10.0.0.18", device_kind="cpu"
).global_table


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Returns the path of every node below `value`."""
    if isinstance(value, dict):
        below = [((*path, key), item) for key, item in value.items()]
    elif isinstance(value, list):
        below = [((*path, index), item) for index, item in enumerate(value)]
    else:
        return []
    return [one for where, item in below for one in (where, *places(item, where))]


def written(path: tuple) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def get(value: object, path: tuple) -> object:
    for part in path:
        value = value[part]  # type: ignore[index]
    return value


def put(value: object, path: tuple | list, replacement: object) -> None:
    get(value, tuple(path[:-1]))[path[-1]] = replacement  # type: ignore[index]


def corrupt(value: dict, rng: random.Random) -> str:
    """Corrupts `value` in place; returns the field that the error must name."""
    path = rng.choice(places(value))
    kind = rng.choice(["replace", "delete"])
    if kind == "delete" and isinstance(path[-1], str):
        del get(value, path[:-1])[path[-1]]  # type: ignore[attr-defined]
        return written(path)
    put(value, path, rng.choice([None, True, 7, 2.5, float("nan"), "", "a b", "\ud800 \n"]))
    return written(path)


def test_a_corrupted_table_is_refused_at_its_field() -> None:
    for seed in range(300):
        value = TABLE.to_dict()
        field = corrupt(value, random.Random(seed))
        with pytest.raises(RankTableError) as caught:
            parse_global(value, "g.json")
        error = caught.value
        assert (error.file, error.field) == ("g.json", field), f"seed {seed}"
        assert str(error).isprintable(), f"seed {seed}"
        assert str(error).startswith("g.json: "), f"seed {seed}"


def test_foreign_fields_are_kept_wherever_they_are() -> None:
    """Foreign fields with any name and value survive reading and writing a table."""
    for seed in range(100):
        rng = random.Random(seed)
        value = TABLE.to_dict()
        for path in rng.sample([(), *places(value)], 5):
            if isinstance(get(value, path), dict):
                key = rng.choice(["rank", "devices", "host_nic_ip", "super_pod_list", "x\ny", "ö\ud800", ""])
                put(value, (*path, key), rng.choice([None, 1.5, "ö\ud800", [{"a": "b"}], {"device": []}]))
        table = parse_global(value, "g.json")
        assert table == TABLE, f"seed {seed}"
        assert table.to_dict() == value, f"seed {seed}"
        text = table.to_json()
        assert parse_global(json.loads(text.encode()), "g.json").to_json() == text, f"seed {seed}"


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(st.data())
def test_damaged_bytes_raise_nothing_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = bytearray(TABLE.to_json().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=3))
    file = tmp_path_factory.getbasetemp() / "damaged.json"
    file.write_bytes(text)
    refused = None
    try:
        load_global(file)
    except RankTableError as error:
        refused = error
    if refused:
        assert refused.file == str(file)
        assert refused.field
        assert str(refused).isprintable()
