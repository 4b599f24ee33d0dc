"""Knows the names by which requests may use the model and its adapters, and checks callers' permissions."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence

from pd_cluster.cluster.records.request_timeline import FOLLOWER
from pd_cluster.errors import ModelNotFound, RequestError
from pd_cluster.service.callers.caller import NOBODY, Caller
from pd_cluster.settings.engine_config import model_name
from pd_cluster.types.variants import num_virtual_tokens


class ServedNames:
    """`own`: the model's names; if empty, the last part of its path and the whole path are names.
    `adapters`: current names of adapters -> digests. `is_required`: a request must name a model.
    """

    def __init__(
        self, model: str, own: Sequence[str] = (), adapters: Mapping[str, str] | None = None, is_required: bool = False
    ) -> None:
        self.model = model
        self.own = list(own) or [model_name(model)]
        self._alike = set() if own else {model, *self.own}  # permission for one of these names is permission for all
        self.adapters: Mapping[str, str] = adapters if adapters is not None else {}
        self._is_required = is_required

    def for_caller(self, caller: Caller) -> list[str]:
        """Returns the model's names that the caller may use."""
        return [name for name in self.own if self._may_use(name, caller)]

    def adapters_for(self, caller: Caller) -> list[str]:
        """Returns the names of adapters that the caller may use."""
        return [name for name in self.adapters if caller.may_use(name)]

    def variant_of(self, name: str | None, caller: Caller = NOBODY) -> str:
        """Returns the digest of the adapter of this name; "" for the model itself. Raises ModelNotFound."""
        return "" if name is None else self.adapters.get(self.check(name, caller), "")

    def lora_of(self, name: str | None, caller: Caller = NOBODY) -> str:
        """Returns the digest for a pooling request, which prompt adapters do not support.

        Raises ModelNotFound, RequestError.
        """
        variant = self.variant_of(name, caller)
        if num_virtual_tokens(variant):
            raise RequestError("model: a prompt adapter makes no vectors; name the model itself", param="model")
        return variant

    def check(self, name: str | None, caller: Caller = NOBODY) -> str:
        """Returns the name for the answer: the model's, or an adapter's.

        Raises ModelNotFound, or RequestError if a required name is missing.
        """
        found = self._known(name, caller)
        if (follower := FOLLOWER.get()) is not None:
            follower.asks(found)
        return found

    def check_use(self, caller: Caller) -> None:
        """Checks that the caller may use the model under at least one name. Raises ModelNotFound."""
        if not self.for_caller(caller):
            self.check(self.own[0], caller)

    def _may_use(self, name: str, caller: Caller) -> bool:
        return any(caller.may_use(each) for each in (self._alike if name in self._alike else (name,)))

    def _known(self, name: str | None, caller: Caller) -> str:
        if name is not None and (name in self.own or name in self.adapters) and self._may_use(name, caller):
            return name
        own = self.for_caller(caller)
        names = own + self.adapters_for(caller)
        if name is None and self._is_required:
            raise RequestError(
                f"model: missing; this server requires it (--require-model): {', '.join(names)}", param="model"
            )
        if name is None and own:
            return own[0]
        if name == self.model and self._may_use(name, caller):
            return name
        raise ModelNotFound(
            f"the model {reprlib.repr(name)} does not exist; this server has "
            f"{', '.join(names) or 'none that this key may use'}",
            param="model",
            code="model_not_found",
        )
