"""The forms of the replies as JSON schemas, for endpoints that can keep a model to one."""

from memcalib_jax.construction.assurance import REVIEW_CHECKS
from memcalib_jax.construction.derivation import TASK_KINDS
from memcalib_jax.construction.distractors import RUBRIC_TEXTS
from memcalib_jax.data.records import ACTIONS, LEVELS


def _object(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False}


def _list(items: dict) -> dict:
    return {"type": "array", "items": items}


def _one_of(names) -> dict:
    return {"type": "string", "enum": list(names)}


_TEXT, _TRUTH, _NUMBER = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
_PASSAGES = _list(_object(text=_TEXT, quotes=_list(_TEXT)))

SCHEMAS = {
    "screen": _object(coherent=_TRUTH, extractable=_TRUTH, reason=_TEXT),
    "derive": _object(passages=_PASSAGES, query=_TEXT),
    "derive_coding": _object(passages=_PASSAGES, query=_TEXT, task_kind=_one_of(TASK_KINDS)),
    "annotate": _object(atoms=_list(_object(passage=_NUMBER, text=_TEXT, level=_one_of(LEVELS),
                                            action=_one_of(ACTIONS)))),
    "distract": _object(hard=_TEXT, others=_list(_TEXT)),
    "rubric": _object(rubrics=_list(_object(
        number=_NUMBER, **dict.fromkeys(RUBRIC_TEXTS, _TEXT), observable_checks=_list(_TEXT)))),
    "naturalize": _object(blocks=_list(_object(id=_TEXT, text=_TEXT))),
    "review": _object(checks=_object(**{
        name: _object(**{"pass": _TRUTH, "reason": _TEXT}) for name in REVIEW_CHECKS})),
    "respond": _object(response=_TEXT),
    "verify": _object(atoms=_list(_object(id=_TEXT, level=_one_of(LEVELS))), quality=_TRUTH,
                      safe=_TRUTH, reason=_TEXT),
}
"""By the name of the prompt. Replies are read strictly in any case."""
