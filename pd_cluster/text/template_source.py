"""Reads the chat template that an operator or a caller gives: a file name, or the template itself."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pd_cluster.errors import ConfigError, ModelError, called
from pd_cluster.settings.request_settings import ChatConfig
from pd_cluster.text.chat_template import ChatTemplate

NAME = called("chat_template")


def with_source(chat: ChatConfig) -> ChatConfig:
    """Returns the config with a template's file name replaced by its source.

    Raises ConfigError, also for a template that does not compile.
    """
    if not chat.template:
        return chat
    source = _source_of(chat.template)
    try:
        ChatTemplate(source)
    except ModelError as error:
        raise ConfigError(f"{NAME}: {error.text}") from None
    return msgspec.structs.replace(chat, template=source)


def _source_of(given: str) -> str:
    r"""Returns a file's content, or the template itself; a template on one line may contain \n escapes.

    Raises ConfigError.
    """
    if not set(given) & set("{}\n"):
        try:
            return Path(given).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{NAME} {given}: cannot be read: {error}") from None
    if "\n" in given:
        return given
    try:
        return given.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{NAME}: the one-line template has an invalid escape: {error}") from None
