"""API keys: made, hashed, found in requests, looked up, and written into tenant files."""

from __future__ import annotations

import hashlib
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.daemon.keys import (
    KeyTable,
    add_key_to_file,
    hash_key,
    is_key_subprotocol,
    key_of,
    new_key,
    remove_key_from_file,
)
from seedance.errors import ConfigError
from seedance.qos.quota import Quota, load

KEY = "sk-seed-abcDEF_123-xyz"
OTHER = "sk-seed-other-key"
A, B, C = (hash_key(letter) for letter in "abc")


def test_new_keys_are_long_url_safe_and_different() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert key.startswith("sk-seed-")
        assert len(key) == len("sk-seed-") + 43
        assert key.replace("-", "").replace("_", "").isalnum()
        assert key_of([("authorization", f"Bearer {key}")]) == key


def test_hash() -> None:
    assert hash_key("abc") == hash_key(b"abc") == "sha256:" + hashlib.sha256(b"abc").hexdigest()
    assert load(f'keys = ["{hash_key(new_key())}"]', "t", "a").tenant == "a"


def test_key_table() -> None:
    table = KeyTable([Quota(tenant="a", keys=(A, B)), Quota(tenant="c", keys=(C,)), Quota(tenant="none")])
    assert len(table) == 3
    assert [table.tenant_of(key) for key in ("a", "b", b"c", "d", "")] == ["a", "a", "c", None, None]
    assert table.tenant_of(A) is None, "a hash is not a key"


@pytest.mark.parametrize(
    ("headers", "query", "expected"),
    [
        ([], "", None),
        ([("authorization", f"Bearer {KEY}")], "", KEY),
        ([("Authorization", f"bearer   {KEY} ")], "", KEY),
        ([("host", "x"), ("authorization", f"BEARER {KEY}"), ("accept", "*/*")], "", KEY),
        ([("authorization", KEY)], "", None),
        ([("authorization", "Bearer")], "", None),
        ([("authorization", f"Basic {KEY}")], "", None),
        ([("authorization", f"Bearer {KEY} {OTHER}")], "", None),
        ([("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {OTHER}")], "", None),
        ([("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")], "", KEY),
        ([("authorization", "Bearer schlüssel-schlüssel")], "", None),
        ([("authorization", "Bearer " + "x" * 257)], "", None),
        ([("authorization", "Bearer short")], "", None),
        ([("sec-websocket-protocol", f"seedance.json.v1, seedance.key.{KEY}")], "", KEY),
        ([("sec-websocket-protocol", "seedance.json.v1"), ("sec-websocket-protocol", f"seedance.key.{KEY}")], "", KEY),
        ([("sec-websocket-protocol", f"seedance.key.{KEY},seedance.key.{OTHER}")], "", None),
        ([("sec-websocket-protocol", KEY)], "", None),
        ([], f"key={KEY}", KEY),
        ([], f"a=b&key={KEY}&c=d", KEY),
        ([], f"key={KEY.replace('-', '%2D')}", KEY),
        ([], f"key={KEY}&key={OTHER}", None),
        ([], f"apikey={KEY}", None),
        ([], "key=", None),
        ([], "key=%FF%00aaaaaaaa", None),
        ([("authorization", f"Bearer {KEY}")], f"key={OTHER}", KEY),
        ([("authorization", "Bearer !!!!!!!!!")], f"key={OTHER}", None),
        ([("authorization", f"Basic {OTHER}")], f"key={KEY}", KEY),
        ([("sec-websocket-protocol", f"seedance.key.{KEY}")], f"key={OTHER}", KEY),
        ([("x-api-key", KEY)], "", None),
    ],
)
def test_key_of_a_request(headers: list[tuple[str, str]], query: str, expected: str | None) -> None:
    assert key_of(headers, query) == expected


@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from(["authorization", "sec-websocket-protocol", "host"]),
            st.one_of(st.text(max_size=40), st.text(max_size=40).map("Bearer {}".format)),
        ),
        max_size=4,
    ),
    query=st.text(max_size=60),
)
def test_key_of_any_request_is_a_key_or_none(headers: list[tuple[str, str]], query: str) -> None:
    key = key_of(headers, query)
    assert key is None or (8 <= len(key) <= 256 and key.isascii() and key.isprintable())


def test_key_subprotocols_are_known() -> None:
    assert is_key_subprotocol("seedance.key.x")
    assert not is_key_subprotocol("seedance.json.v1")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f'keys = ["{C}"]\n'),
        ("[cpu]\nmax = '50%'\n", f"keys = [\"{C}\"]\n[cpu]\nmax = '50%'\n"),
        ("# Acme\n# and more\n\nclass = 'gold'\n", f"# Acme\n# and more\n\nkeys = [\"{C}\"]\n\nclass = 'gold'\n"),
        ("# of the class\nclass = 'gold'\n", f"keys = [\"{C}\"]\n# of the class\nclass = 'gold'\n"),
        ("# only this\n", f'# only this\n\nkeys = ["{C}"]\n'),
        ("keys = []", f'keys = ["{C}"]'),
        ("keys = [ ]", f'keys = ["{C}" ]'),
        (f'keys = ["{A}"]  # one\n[cpu]', f'keys = ["{A}", "{C}"]  # one\n[cpu]'),
        (f"keys=['{A}','{B}',]\n", f"keys=['{A}','{B}', \"{C}\"]\n"),
        (
            f'keys = [\n  "{A}",  # laptop ]\n  "{B}",  # server\n]\n',
            f'keys = [\n  "{A}",  # laptop ]\n  "{B}",  # server\n  "{C}",\n]\n',
        ),
        (f'keys = [\n\t"{A}"  # last\n]\n', f'keys = [\n\t"{A}",  # last\n\t"{C}",\n]\n'),
        (f'keys = [\n  "{A}"\n  , # comma\n]\n', f'keys = [\n  "{A}"\n  , # comma\n  "{C}",\n]\n'),
        (f'keys = [\n  "{A}",\n  "{B}"]\n', f'keys = [\n  "{A}",\n  "{B}", "{C}"]\n'),
        ("keys = [\n  # none yet\n]\n", f'keys = [\n  # none yet\n    "{C}",\n]\n'),
        (f'keys = ["{A}"]\r\n[cpu]\r\n', f'keys = ["{A}", "{C}"]\r\n[cpu]\r\n'),
        ("# x\r\n\r\n[cpu]\r\n", f'# x\r\n\r\nkeys = ["{C}"]\r\n\r\n[cpu]\r\n'),
        (f'keys = [\r\n  "{A}"\r\n]\r\n', f'keys = [\r\n  "{A}",\r\n  "{C}",\r\n]\r\n'),
        (f'"keys" = ["{A}"]\n', f'"keys" = ["{A}", "{C}"]\n'),
        ("group = 'x'\n", f"keys = [\"{C}\"]\ngroup = 'x'\n"),
        ("#keys = []\ngroup = 'x'\n", f"keys = [\"{C}\"]\n#keys = []\ngroup = 'x'\n"),
        (f'keys = ["{C}"]', f'keys = ["{C}"]'),
    ],
)
def test_key_is_added_and_all_else_stays(before: str, after: str) -> None:
    assert add_key_to_file(before, C) == after
    assert C in tomllib.loads(after)["keys"]
    assert add_key_to_file(after, C) == after


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("keys = ", "cannot read it as TOML"),
        ("keys = 'x'", "by hand"),
        ('text = """\nkeys = []\n"""\nkeys = []', "by hand"),
        ('"k\\u0065ys" = []', "by hand"),
    ],
)
def test_what_cannot_be_edited_is_left_to_people(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        add_key_to_file(text, C, "/t/a.toml")
    assert raised.value.path == "/t/a.toml"


white = st.sampled_from(["", " ", "\n", "\n  ", "\t", " # a ] comment, \"'\n", "\r\n"])


@given(
    entries=st.lists(st.tuples(st.sampled_from([A, B]), st.sampled_from("\"'"), white, white), max_size=3),
    trailing=st.booleans(),
    end=white,
    before=st.sampled_from(["", "# head\n", "# head\n\n", "class = 'gold'\n"]),
    after=st.sampled_from(["", "\n", "\n[cpu]\nmax = '50%'\n", " # end\n[tokens]\n"]),
)
def test_any_layout_of_the_list_is_edited_in_place(
    entries: list[tuple[str, str, str, str]], trailing: bool, end: str, before: str, after: str
) -> None:
    items = ",".join(f"{left}{quote}{key}{quote}{right}" for key, quote, left, right in entries)
    text = f"{before}keys = [{items}{',' if trailing and entries else ''}{end}]{after}"
    expected = tomllib.loads(text)
    edited = add_key_to_file(text, C)
    expected["keys"].append(C)
    assert tomllib.loads(edited) == expected
    for comment in ("# head", "# a ] comment, \"'", "# end"):
        assert edited.count(comment) == text.count(comment)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (f'keys = ["{A}"]\n', "keys = []\n"),
        (f'keys = ["{A}", "{B}"]\n', f'keys = ["{B}"]\n'),
        (f'keys = ["{B}", "{A}"]\n', f'keys = ["{B}"]\n'),
        (f'keys = ["{B}", "{A}", "{C}"]\n', f'keys = ["{B}", "{C}"]\n'),
        (f"keys = ['{A}',]\n", "keys = []\n"),
        (f'# x\n"keys" = [ "{A}" ] # y\n[cpu]\nmax = "1%"\n', '# x\n"keys" = [  ] # y\n[cpu]\nmax = "1%"\n'),
        (
            f'keys = [\n    "{B}",  # laptop\n    "{A}",  # phone\n    "{C}",\n]\n',
            f'keys = [\n    "{B}",  # laptop\n    "{C}",\n]\n',
        ),
        (f'keys = [\n    "{B}",\n    "{A}"\n]\n', f'keys = [\n    "{B}",\n]\n'),
        (f'keys = [\r\n  "{A}",\r\n  "{B}",\r\n]\r\n', f'keys = [\r\n  "{B}",\r\n]\r\n'),
        (f'keys = [\n  # "{A}"\n  "{B}",\n  "{A}",\n]\n', f'keys = [\n  # "{A}"\n  "{B}",\n]\n'),
        (f'keys = ["{B}"]\n', f'keys = ["{B}"]\n'),
        ("", ""),
    ],
)
def test_a_key_is_taken_out_and_the_rest_stays(text: str, after: str) -> None:
    assert remove_key_from_file(text, A) == after


def test_a_layout_that_is_not_understood_is_left_to_a_person() -> None:
    with pytest.raises(ConfigError, match="by hand"):
        remove_key_from_file(f'keys = ["\\u0073{A[1:]}"]\n', A, "t.toml")


def test_a_list_of_the_same_name_in_a_table_is_not_the_keys() -> None:
    text = f'[cpu]\nkeys = ["{A}"]\n'
    assert remove_key_from_file(text, A, "t.toml") == text


def test_a_file_that_is_no_toml_keeps_its_keys() -> None:
    with pytest.raises(ConfigError, match="TOML"):
        remove_key_from_file("[[", A, "t.toml")


@given(
    hashes=st.lists(st.sampled_from([A, B, C]), unique=True, min_size=1),
    separator=st.sampled_from([", ", ",", " , ", ",\n  ", ',  # a ] " comment\n  ', "\n,\n"]),
    ends=st.sampled_from([("[", "]"), ("[ ", " ]"), ("[\n  ", ",\n]"), ("[", ",]"), ("[ # [\n", "\n]")]),
    quote=st.sampled_from("\"'"),
    data=st.data(),
)
def test_adding_undoes_removing(
    hashes: list[str], separator: str, ends: tuple[str, str], quote: str, data: st.DataObject
) -> None:
    text = "keys = " + ends[0] + separator.join(quote + entry + quote for entry in hashes) + ends[1] + "\nclass = 'x'\n"
    chosen = data.draw(st.sampled_from(hashes))
    after = remove_key_from_file(text, chosen)
    assert tomllib.loads(after) == {"keys": [entry for entry in hashes if entry != chosen], "class": "x"}
    assert chosen not in after
    assert set(tomllib.loads(add_key_to_file(after, chosen))["keys"]) == set(hashes)
