"""Compiles guides for one tokenizer and computes the tokens that may follow. Only this module uses llguidance.

The engine uses it, and so does the child process that checks clients' guides. All limits count work, not time, so a
guide that compiles in one process compiles in the other. Knows nothing of requests or logits; imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import llguidance
import msgspec
import numpy as np
from numpy.typing import NDArray

from pd_cluster.checkpoints.sentencepiece import tokenizer_text
from pd_cluster.errors import GuideError
from pd_cluster.text.thinking_budget import BudgetTree, ThinkingBudget, ThinkingMarkers
from pd_cluster.types import Guide

ANYTHING = np.uint32(0xFFFFFFFF)
Words = NDArray[np.uint32]  # bit t % 32 of word t // 32: token t may follow

# The whitespace that formatters write between a JSON value's parts: none, a space, or a newline with its indentation.
# Without this limit, a model could write whitespace forever.
WHITESPACE = r"( |\n {0,32}|\n\t{0,8})?"
# Lets models write any character as a \u escape; by default only control characters may be written so.
JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}
MAX_ERROR_NUM_CHARS = 300
MAX_NESTING = 8  # maximum depth of expressions in one rule; the library allows slightly more
NO_TOKENS: Mapping[str, int] = MappingProxyType({})
DIRECTIVES = ("%ignore", "%import")  # allowed in a grammar; the library's other directives depend on its internals
_NOISE = re.compile(  # parts of messages: positions in a generated source, the whole pattern, the whole vocabulary
    r"^Failed to convert the grammar from GBNF to Lark: |^(?:at )?\d+\(\d+\): "
    r'|^invalid regex ".*" \(in regex\): |; following special tokens .*| in regex /.*',
    re.DOTALL,
)
_EXCERPT = re.compile(r"<|\d+ \||\^+$")
_PLAINER = {
    "NoExtension": "nothing can follow, and the output is not complete",
    "oneOf constraints": "oneOf is supported where no value fits two of its schemas; use anyOf",
}
_DIRECTIVE = re.compile(r"%[A-Za-z_]+")
# Lark's mark before a rule's name; it affects the syntax tree, but not which texts match.
_TREE_MARK = re.compile(r"^[?!](?=[a-z_]+\s*:)", re.MULTILINE)
_LITERAL_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|/(?:\\.|[^/\\\n])+/|#[^\n]*|//[^\n]*')


class Compiler:
    """One model's tokenizer in the library's form, shared by all guides and threads."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`tokenizer_file`: a folder's tokenizer.json, or one made from another format. `vocab_size` is the model's;
        ids that the tokenizer does not have are never output, except end tokens. Raises GuideError.
        """
        ends = sorted(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        if not ends:
            raise GuideError("the model names no end-of-sequence token, so no guided output could end")
        text = tokenizer_text(tokenizer_file)
        file = json.loads(text)
        known = _known_ends(file, ends)
        try:
            tokenizer = _tokenizer_of(text, vocab_size, known)
        except ValueError as error:
            raise GuideError(f"this model's tokenizer cannot be guided: {one_line(str(error))}") from None
        self._tokenizer = tokenizer
        self.num_words = (tokenizer.vocab_size + 31) // 32  # words of a mask; bits beyond vocab_size are unused
        self.end_words = words_of(ends, self.num_words)
        known_words = words_of(known, self.num_words)
        self._ends = None if known == ends else (self.end_words, known_words & ~self.end_words)
        self._executor = llguidance.LLExecutor(1)
        self._special = _special_tokens(file, tokenizer)
        self._own_texts = {token_id: text.encode() for text, token_id in self._special.items()}
        self._inside: list[tuple[int, bytes]] | None = None  # computed when a budget first ends within a character
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=2000,
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=50_000,  # about 2 KiB each
            max_grammar_size=500_000,
            verbose_errors=False,
        )

    def compile(self, guide: Guide) -> Matcher:
        """Returns a matcher before the first token. Raises GuideError."""
        if guide.kind == "budget":
            return self._budgeted(guide)
        try:
            source = source_of(guide, self._special)
        except (AttributeError, LookupError, RecursionError, StopIteration, TypeError, ValueError) as error:
            raise GuideError(f"not a guide of kind {guide.kind}: {one_line(str(error))}") from None
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GuideError(one_line(matcher.get_error()))
        if warnings := matcher.get_grammar_warnings():
            raise GuideError(one_line(warnings[0]))  # for example, that a keyword would be ignored
        return Matcher(matcher, ends=self._ends)

    def _budgeted(self, guide: Guide) -> Matcher:
        """Returns a matcher for a guide of kind "budget" and the guide in it, if any. Raises GuideError."""
        try:
            tree = msgspec.json.decode(guide.text, type=BudgetTree)
        except msgspec.DecodeError as error:
            raise GuideError(f"not a guide of kind budget: {one_line(str(error))}") from None
        close = tree.closes[0]
        marks = ThinkingMarkers(
            tree.num_tokens,
            tuple(mark.encode() for mark in tree.opens),
            tuple(mark.encode() for mark in tree.closes),
            [self._special[close]] if close in self._special else self._tokenizer.tokenize_str(close),
            self._text_of,
            self._continuing,
        )
        inner = None if tree.inner is None else self.compile(tree.inner)
        budget = ThinkingBudget(marks, tree.starts == "reasoning")
        return Matcher(inner._matcher if inner is not None else None, budget, self._ends)

    def _text_of(self, token_id: int) -> bytes:
        own = self._own_texts.get(token_id)
        return bytes(self._tokenizer.decode_bytes([token_id])) if own is None else own

    def _continuing(self) -> list[tuple[int, bytes]]:
        """Returns the tokens whose first byte continues a character, with their bytes."""
        if self._inside is None:
            texts = ((token_id, self._text_of(token_id)) for token_id in range(self._tokenizer.vocab_size))
            self._inside = [(token_id, text) for token_id, text in texts if 0x80 <= (text or b"a")[0] < 0xC0]
        return self._inside

    def write_masks(self, matchers: Sequence[Matcher], table: Words) -> list[str]:
        """Calls `Matcher.write_mask` of each matcher, into `table` [num_matchers, num_words]. Returns an error or ""
        for each.

        A single call runs without the interpreter's lock; taking the lock for each row would slow other threads.
        """
        rows = [(each._matcher, at) for at, each in enumerate(matchers) if each._matcher is not None]
        if rows:
            self._executor.unsafe_compute_mask_ptr(rows, table.ctypes.data, table.strides[0], len(table))
        for at, each in enumerate(matchers):
            each.limit(table[at])
        return [each.problem for each in matchers]


class Matcher:
    """The progress of one output. An error is permanent. Without the library's matcher, any token may follow."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher | None,
        budget: ThinkingBudget | None = None,
        ends: tuple[Words, Words] | None = None,
    ) -> None:
        """`ends`: the mask bits to set and to clear where the output may end, for end tokens that the library does not
        know.
        """
        self._matcher = matcher
        self.budget = budget
        self._ends = ends

    def copy(self) -> Matcher:
        matcher = self._matcher.deep_copy() if self._matcher is not None else None
        return Matcher(matcher, self.budget.copy() if self.budget is not None else None, self._ends)

    def take(self, token_ids: Sequence[int]) -> None:
        """Advances by these tokens. Raises GuideError for a token that may not follow."""
        if self._matcher is not None and token_ids and not self._matcher.consume_tokens(list(token_ids)):
            raise GuideError(one_line(self._matcher.get_error()))
        if self.budget is not None:
            self.budget.take(token_ids)

    def forced(self) -> list[int]:
        """Returns the tokens of the text that must follow, as the tokenizer splits it; other tokenizations may also be
        allowed.

        Returns none within reasoning, because a budget may end it anywhere.
        """
        return [] if self._matcher is None or self.budget is not None else self._matcher.compute_ff_tokens()

    def write_mask(self, words: Words) -> None:
        """Writes which tokens may follow into contiguous words [num_words]. Raises GuideError, also if none may."""
        if self._matcher is not None:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self.limit(words)
        if self.problem:
            raise GuideError(self.problem)

    def limit(self, words: Words) -> None:
        """Corrects end tokens in the library's mask, or fills it if there is no matcher; then applies the budget."""
        if self._matcher is None:
            words[:] = ANYTHING
        elif self._ends is not None and self.accepts:
            words |= self._ends[0]
            words &= ~self._ends[1]
        if self.budget is not None:
            self.budget.limit(words)

    @property
    def accepts(self) -> bool:
        """Whether the output may end here: only then does an end token end it; otherwise the token is text."""
        return self._matcher is None or self._matcher.is_accepting()

    @property
    def is_forced(self) -> bool:
        """Whether only tokens that close the reasoning may follow, because the budget is used up."""
        return self.budget is not None and self.budget.is_used_up

    @property
    def problem(self) -> str:
        return one_line(self._matcher.get_error()) if self._matcher is not None and self._matcher.is_error() else ""


def _known_ends(file: dict[str, Any], ends: list[int]) -> list[int]:
    """Returns the end tokens for the library. It treats each of them as the end, even within text, so tokens of text
    are left out.

    If all end tokens of the model are text, or not in the tokenizer, returns another token that is not text.
    """
    added = file.get("added_tokens", [])
    ids = {token["id"] for token in added if token.get("special") or re.fullmatch("<.*>", token["content"])}
    return [token_id for token_id in ends if token_id in ids] or sorted(ids)[:1] or ends[:1]


def _tokenizer_of(text: str, vocab_size: int, ends: list[int]) -> llguidance.LLTokenizer:
    """Returns the tokenizer with at least `vocab_size` ids. Raises ValueError."""
    try:
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
    except ValueError:  # the file has more ids than the model, or it cannot be read
        return llguidance.LLTokenizer(text, eos_token=ends)


def words_of(token_ids: Iterable[int], num_words: int) -> Words:
    words = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


def one_line(message: str) -> str:
    """Returns the library's message without internal details, and without the source excerpts below it."""
    for beginning, words in _PLAINER.items():
        if message.startswith(beginning):
            return words
    lines = (line.strip() for line in _NOISE.sub("", _NOISE.sub("", message)).splitlines())
    text = " ".join(line for line in lines if line and not _EXCERPT.match(line))
    return text if len(text) <= MAX_ERROR_NUM_CHARS else text[: MAX_ERROR_NUM_CHARS - 1] + "…"


# ---- a guide in the library's language


def source_of(guide: Guide, special_tokens: Mapping[str, int] = NO_TOKENS) -> str:
    """Returns the guide as a grammar. Raises GuideError."""
    match guide.kind:
        case "json":
            return _json_source(guide.text)
        case "json_object":
            return _json_source('{"type":"object"}')
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(without_anchors(guide.text))
        case "choice":
            texts = " | ".join(json.dumps(text) for text in json.loads(guide.text))
            return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        case "grammar":
            return _grammar_source(guide.text)
        case "structural_tag":
            return _structural_source(json.loads(guide.text), special_tokens)
        case "reply":
            return _ReplySource(special_tokens).of(json.loads(guide.text))
        case "budget":
            raise ValueError("a budget is not part of a grammar")


def _json_source(schema: str) -> str:
    pattern = json.loads(schema).get("x-guidance", {}).get("whitespace_pattern", WHITESPACE)
    options: Any = {**JSON_OPTIONS, "whitespace_pattern": pattern}
    return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)


def without_anchors(pattern: str) -> str:
    """Removes a leading `^` and a trailing `$`, which the library does not support. They are redundant, because the
    whole output must match.
    """
    pattern = pattern.removeprefix("^")
    bare = pattern.removesuffix("$")
    num_backslashes = len(bare) - len(bare.rstrip("\\"))
    return pattern if num_backslashes % 2 else bare


def _grammar_source(text: str) -> str:
    for directive in _DIRECTIVE.findall(_LITERAL_OR_COMMENT.sub(" ", text)):
        if directive not in DIRECTIVES:
            raise GuideError(f"{directive} is not supported; supported directives: {' and '.join(DIRECTIVES)}")
    if text.lstrip().startswith("{"):
        raise GuideError("it must be EBNF, not JSON")
    if "::=" not in _LITERAL_OR_COMMENT.sub(" ", text):
        return llguidance.LLMatcher.grammar_from_lark(_TREE_MARK.sub("", text))
    try:
        return llguidance.grammar_from("grammar", text)
    except (ValueError, RecursionError) as error:
        raise GuideError(one_line(str(error))) from None


def _structural_source(tag: dict[str, Any], special_tokens: Mapping[str, int]) -> str:
    """Allows free text until a trigger, then the structure that begins with it, then free text again."""
    parts = ["%llguidance {}"]
    names = [f"tag_{at}" for at in range(len(tag["structures"]))]
    parts.append(f"start: ({' | '.join(names)})* TEXT")
    parts.append(r"TEXT: /(.|\n)*/")
    for name, structure in zip(names, tag["structures"], strict=True):
        begin = structure["begin"]
        trigger = next(each for each in tag["triggers"] if begin.startswith(each))
        rest = [json.dumps(text) for text in (begin[len(trigger) :],) if text]
        body = [*rest, f"%json {json.dumps(_with_whitespace(structure['schema']))}"]
        body += [json.dumps(structure["end"])] if structure["end"] else []
        if trigger in special_tokens:
            parts.append(f"{name}: TEXT <[{special_tokens[trigger]}]> {' '.join(body)}")
        else:
            parts.append(f"{name}_head[lazy]: TEXT {json.dumps(trigger)}")
            parts.append(f"{name}: {name}_head {' '.join(body)}")
    return llguidance.LLMatcher.grammar_from_lark("\n".join(parts))


def _with_whitespace(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": JSON_OPTIONS}


def _special_tokens(file: dict[str, Any], tokenizer: llguidance.LLTokenizer) -> dict[str, int]:
    """Returns the tokens that the library does not treat as text; grammars refer to them by id.

    These include added tokens of the form `<like_this>`, even if the tokenizer does not mark them as special.
    """
    added = {token["content"]: token["id"] for token in file.get("added_tokens", [])}
    return {text: token_id for text, token_id in added.items() if tokenizer.is_special_token(token_id)}


class _ReplySource:
    """Converts a reply's tree (defined in parsers/guide_nodes.py) to one grammar, with rules for the guides inside it.

    A rule that ends at a marker is lazy: it ends at the marker's last character, even if a longer match is possible.
    A marker may be a token that is not text, or contain several such tokens.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._rules = ["%llguidance {}", r"TEXT: /(.|\n)*/", r"BLANKS: /[ \n]{1,4}/"]
        self._others: list[dict[str, Any]] = []
        self._depth = 0
        self._named: dict[str, str] = {}  # a rule of the tree -> the rule of the grammar

    def of(self, tree: list[Any]) -> str:
        self._rules.append(f"start: {self._expression(tree)}")
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(self._rules)}, *self._others]})

    def _expression(self, node: list[Any]) -> str:
        """Returns a node's expression, or the name of a rule for it: the library limits the depth of a rule."""
        self._depth += 1
        made = self._nested(node)
        self._depth -= 1
        if self._depth % MAX_NESTING or not self._depth or not made.startswith("("):
            return made
        self._rules.append(f"nested_{len(self._rules)}: {made}")
        return f"nested_{len(self._rules) - 1}"

    def _nested(self, node: list[Any]) -> str:
        match node:
            case ["seq", *inner]:
                return f"({' '.join(map(self._expression, inner))})"
            case ["any", *inner]:
                return f"({' | '.join(map(self._expression, inner))})"
            case ["repeat", _, 0, _] | ["text", ""]:
                return '""'
            case ["repeat", least, most, inner]:
                return f"({self._expression(inner)}){{{least},{'' if most is None else most}}}"
            case ["marker", str(text)]:
                tokens = self._of_tokens(text)
                return f"BLANKS? {tokens}" if tokens else self._lazy(f"BLANKS? {json.dumps(text)}")
            case ["until", *texts]:
                found = self._lazy(f"TEXT ({' | '.join(map(json.dumps, texts))})")
                others = [self._text_and(tokens) for text in texts if (tokens := self._of_tokens(text))]
                return f"({' | '.join([found, *others])})" if others else found
            case ["exact", str(text)]:
                return self._of_tokens(text) or json.dumps(text)
            case ["text", str(text)]:
                return json.dumps(text)
            case ["pattern", str(pattern)]:
                return f"/{pattern}/"
            case ["json", dict(schema)]:
                return f"%json {json.dumps(_with_whitespace(schema))}"
            case ["guide", kind, text]:
                return self._other(Guide(kind, text))
            case ["rules", dict(rules), inner]:
                return self._with_rules(rules, inner)
            case ["rule", str(name)]:
                return self._named[name]
        raise ValueError(f"{node[0]}: no such node")

    def _with_rules(self, rules: dict[str, Any], inner: list[Any]) -> str:
        outer = self._named
        first = len(self._rules)
        self._named = {**outer, **{name: f"own_{first}_{at}" for at, name in enumerate(rules)}}
        for name, node in rules.items():
            self._rules.append(f"{self._named[name]}: {self._expression(node)}")
        made = self._expression(inner)
        self._named = outer
        return made

    def _of_tokens(self, text: str) -> str:
        """Returns the expression for a text with tokens that the library does not treat as text; "" if it has none."""
        pieces = [piece for piece in self._tokens.split(text) if piece] if self._tokens is not None else []
        if not any(piece in self._special for piece in pieces):
            return ""
        return " ".join(f"<[{self._special[p]}]>" if p in self._special else json.dumps(p) for p in pieces)

    def _text_and(self, tokens: str) -> str:
        """Returns free text followed by a marker of tokens.

        If the marker begins with text, the rule for the free text ends with that text; otherwise the free text would
        absorb it.
        """
        if tokens.startswith("<["):
            return f"TEXT {tokens}"
        begin, end = json.JSONDecoder().raw_decode(tokens)
        name = f"TEXT_{len(self._rules)}"
        escaped = re.escape(begin).replace("/", r"\/").replace("\\\n", r"\n")
        self._rules.append(rf"{name}: /(.|\n)*{escaped}/")
        return f"{name} {tokens[end:]}"

    def _lazy(self, body: str) -> str:
        name = f"lazy_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {body}")
        return name

    def _other(self, guide: Guide) -> str:
        source = source_of(guide, self._special)
        name = f"other_{len(self._others)}"
        body = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
        self._others.append({**body, "name": name})
        return f"@{name}"
