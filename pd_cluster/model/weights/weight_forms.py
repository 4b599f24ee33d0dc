"""The forms that weights may have. Each is an entry here and a class with the methods of `LinearWeight`."""

from __future__ import annotations

from collections.abc import Collection

from pd_cluster.errors import ModelError
from pd_cluster.model.layers.linear_weight import PLAIN, WeightForm, WeightPart
from pd_cluster.model.weights.quantized_weight import CODED, INT8, INT8_STATIC, W4A8

FORMS: dict[str, WeightForm] = {
    "plain": PLAIN,
    "codes": CODED,
    "int8": INT8,
    "int8 of one scale": INT8_STATIC,
    "w4a8": W4A8,
}


def part_of(name: str) -> WeightPart | None:
    """Returns a part by its name in the files; None if no form has such a part."""
    return next((form.parts[name] for form in FORMS.values() if name in form.parts), None)


def form_of(names: Collection[str], place: str) -> WeightForm:
    """Returns the first form that has these parts. Raises ModelError."""
    for form in FORMS.values():
        needed = {name for name, part in form.parts.items() if not part.is_added}
        if needed <= set(names) <= form.parts.keys():
            return form
    raise ModelError(f"{place}: {', '.join(sorted(names))} are not the tensors of a known form ({', '.join(FORMS)})")
