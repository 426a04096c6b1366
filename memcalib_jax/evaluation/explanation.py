"""Why each token of a response has its advantage, channel by channel, as a page and as text."""

import dataclasses
import html
from collections.abc import Sequence

import numpy as np

from memcalib_jax.credit import CHANNELS
from memcalib_jax.evaluation.trace import Trace

_LEVEL_NAMES = ("Ignore", "Bound", "Control")
_OUTCOMES = (
    "moved to the tokens that the atoms changed",
    "uniform: the channel holds no atom",
    "uniform: this channel is not localized",
    "uniform: no counterfactual was scored",
    "uniform: no token's signal is strong enough",
    "uniform: no token is above the threshold",
    "uniform: reward and advantage differ in sign")
_NO_VARIATION = "uniform: all rewards of the group are equal"
_TOP = 8  # tokens listed for a channel in the terminal


@dataclasses.dataclass(frozen=True)
class Part:
    """What one channel adds to the tokens of a response.

    Attributes:
      channel: its index; None for the sum of all.
      title: what it is, in words.
      facts: (name, value) of what holds for all its tokens.
      atoms: texts of the atoms that it holds.
      added_T: float64, what it adds to each token's advantage.
      details_T: one line or more for each token.
    """

    channel: int | None
    title: str
    facts: list[tuple[str, str]]
    atoms: list[str]
    added_T: np.ndarray
    details_T: list[str]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A response with the parts of its advantages: the sum first, then each channel with atoms."""

    name: str
    step: int
    question: str
    facts: list[tuple[str, str]]
    atoms: list[tuple[str, str, str]]
    texts: list[str]
    parts: list[Part]


def explain(trace: Trace, response: int) -> Explanation:
    """Takes a response's advantages apart: the channels' parts add up to the sum (Eq. 3).

    Args:
      trace: of a step.
      response: its number in the trace.
    """
    found = trace.responses[response]
    record = trace.records[trace.record_R[response]]
    actual = trace.actual_R_A[response]
    atoms = [(_LEVEL_NAMES[atom["ideal"]], "?" if level < 0 else _LEVEL_NAMES[level], atom["text"])
             for atom, level in zip(record["atoms"], actual)]
    advantages = trace.advantage_N[trace.tokens_of(response)].astype(np.float64)
    parts = []
    if trace.rms is not None and trace.valid_R[response]:
        parts = [_part(trace, response, channel) for channel in range(len(CHANNELS))
                 if trace.rewards_R_C[response, channel] != 0
                 or trace.channel_advantages_R_C[response, channel] != 0]
    ids = trace.token_N[trace.tokens_of(response)]
    details = [
        "\n".join([f"token {place}, id {token}", f"advantage {advantage:+.4f}"]
                  + [f"{CHANNELS[part.channel]} adds {part.added_T[place]:+.4f}" for part in parts])
        for place, (token, advantage) in enumerate(zip(ids, advantages))]
    settings = trace.settings
    facts = [("method", f"{settings['method']}, {settings['mode']}, {settings['granularity']}"),
             ("tokens", f"{len(advantages)}, ended by {found['finish_reason']}"),
             ("mean advantage", f"{advantages.mean():+.4f}")]
    if trace.rms is not None:
        facts.append(("batch scale", f"{trace.rms:.4f}"))
    if trace.noise is not None:
        facts.append(("noise of d", f"{trace.noise:.4f} nats"))
    if "reason" in found:
        facts.append(("not judged", found["reason"]))
    total = Part(None, "All channels together", [], [], advantages, details)
    return Explanation(trace.name(response), trace.step, record["question"], facts, atoms,
                       trace.token_texts(response), [total, *parts])


def _part(trace: Trace, response: int, channel: int) -> Part:
    settings = trace.settings
    pair = trace.pair_of(response, channel)
    advantage = float(trace.channel_advantages_R_C[response, channel])
    weight = settings["channel_weights_C"][channel]
    uniform = weight * advantage / trace.rms
    length = int(trace.length_R[response])
    effective = np.ones(length) if pair is None else trace.effective_of(pair)
    added = uniform * effective
    ideal, actual = divmod(channel, 3)
    outcome = _OUTCOMES[trace.fallback_R_C[response, channel]]
    facts = [
        ("credit", _NO_VARIATION if advantage == 0 else outcome),
        ("reward", f"{trace.rewards_R_C[response, channel]:+.3f}"),
        ("advantage within the group", f"{advantage:+.4f}"),
        ("weight", f"{weight:g}"), ("eta", f"{settings['eta_C'][channel]:g}"),
        ("added to every token if uniform", f"{uniform:+.4f}")]
    details = [f"adds {value:+.4f}" for value in added]
    if pair is not None:
        facts.append(("threshold", f"{trace.thresholds_C[channel]:.4f} nats"))
        values = zip(trace.difference_of(pair), trace.clipped_of(pair), trace.score_of(pair),
                     trace.barred_of(pair), trace.multiplier_of(pair), effective, added)
        details = [
            f"d {d:+.4f} nats\naligned and clipped {z:+.4f}\nscore q {q:.4f}"
            f"{f', no candidate: {barred}' if barred else ''}\n"
            f"multiplier {m:.4f}, with eta {e:.4f}\nadds {value:+.4f}"
            for d, z, q, barred, m, e, value in values]
    title = (f"{CHANNELS[channel]}  {_LEVEL_NAMES[ideal]} atoms used as "
             f"{_LEVEL_NAMES[actual]}: {_kind(ideal, actual)}")
    atoms = [atom["text"] for atom in trace.atoms_of(response, channel)]
    return Part(channel, title, facts, atoms, added, details)


def _kind(ideal, actual):
    return "right" if ideal == actual else "over-use" if actual > ideal else "under-use"


def shades(values_T: Sequence[float]) -> np.ndarray:
    """Returns colours' strengths in [-1, 1]: values over their greatest magnitude."""
    values = np.asarray(values_T, np.float64)
    greatest = np.abs(values).max(initial=0.0)
    return values / greatest if greatest > 0 else np.zeros_like(values)


def shown(text: str) -> str:
    """Returns a token's text with a sign for what the eye does not see."""
    if not text:
        return "\u25a1"
    return text.replace("\n", "\u21b5\n") if not text.strip() else text


_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, CanvasText 18%, Canvas);
  --soft: color-mix(in srgb, CanvasText 62%, Canvas);
  --panel: color-mix(in srgb, CanvasText 4%, Canvas); }
body { font: 15px/1.6 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; background: Canvas; color: CanvasText; }
h1 { font-size: 1.3rem; margin-bottom: .2rem; } h2 { font-size: 1.05rem; margin: 0 0 .4rem; }
section { border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1.1rem;
  margin: 1rem 0; background: var(--panel); }
dl { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; margin: .2rem 0 .6rem; }
dl div { display: flex; gap: .4rem; } dt { color: var(--soft); } dd { margin: 0; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top; }
th { color: var(--soft); font-weight: normal; border-bottom: 1px solid var(--line); }
ul { margin: .2rem 0 .6rem; padding-left: 1.2rem; color: var(--soft); }
.response { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; }
.response span { border-radius: 2px; padding: .12rem 0; }
.response span:hover { outline: 2px solid CanvasText; }
.bar { display: inline-block; width: 9rem; height: .7rem; border-radius: 2px; margin: 0 .4rem;
  vertical-align: middle; background: linear-gradient(90deg, rgba(214,40,40,.75),
  rgba(214,40,40,0) 50%, rgba(29,101,216,0) 50%, rgba(29,101,216,.75)); }
.legend { color: var(--soft); font-size: .85rem; }
"""
_RED, _BLUE = (214, 40, 40), (29, 101, 216)
_STRONGEST = 0.75  # opacity


def page(explanation: Explanation) -> str:
    """Returns a self-contained HTML page; each token tells its numbers under the pointer."""
    e = html.escape
    rows = "".join(f"<tr><td>{e(ideal)}</td><td>{e(actual)}</td><td>{e(text)}</td></tr>"
                   for ideal, actual, text in explanation.atoms)
    sections = "".join(_section(part, explanation.texts) for part in explanation.parts)
    title = f"{e(explanation.name)} in step {explanation.step}"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body><h1>{title}</h1>
{_facts(explanation.facts)}
<section><h2>Question</h2><div class="response">{e(explanation.question)}</div></section>
<section><h2>Memories</h2><table><tr><th>ideal</th><th>judged</th><th>atom</th></tr>{rows}</table>
</section>
{sections}</body></html>
""".encode("utf-8", "replace").decode("utf-8")  # a decoder may leave half of a surrogate pair


def _section(part, texts):
    greatest = np.abs(part.added_T).max(initial=0.0)
    legend = (f'<p class="legend">{-greatest:+.3f}<span class="bar"></span>{greatest:+.3f} added '
              "to the token's advantage; point at a token for its numbers</p>")
    tokens = "".join(
        f'<span style="background:{_css(shade)}" title="{html.escape(detail)}">'
        f"{html.escape(shown(text))}</span>"
        for text, shade, detail in zip(texts, shades(part.added_T), part.details_T))
    atoms = "".join(f"<li>{html.escape(text)}</li>" for text in part.atoms)
    response = (f'{legend}<div class="response">{tokens}</div>'
                if part.channel is None or _moved(part) else "")
    return (f"<section><h2>{html.escape(part.title)}</h2>{_facts(part.facts)}"
            + (f"<ul>{atoms}</ul>" if atoms else "")
            + f"{response}</section>\n")


def _moved(part):
    return np.ptp(part.added_T) > 1e-9


def _facts(facts):
    items = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
                    for name, value in facts)
    return f"<dl>{items}</dl>" if items else ""


def _css(shade):
    red, green, blue = _BLUE if shade > 0 else _RED
    return f"rgba({red},{green},{blue},{_STRONGEST * abs(shade):.3f})"


def terminal(explanation: Explanation, *, colored: bool) -> str:
    """Returns the explanation as text; `colored` shades the tokens with ANSI colours.

    Without colours, the tokens to which each part adds most are listed.
    """
    lines = [f"{explanation.name} in step {explanation.step}",
             "  ".join(f"{name}: {value}" for name, value in explanation.facts), "",
             explanation.question, ""]
    lines += [f"  ideal {ideal:<8}judged {actual:<8}{text}"
              for ideal, actual, text in explanation.atoms]
    for part in explanation.parts:
        lines += ["", part.title]
        lines += [f"  {name}: {value}" for name, value in part.facts]
        lines += [f"  - {text}" for text in part.atoms]
        if colored and (part.channel is None or _moved(part)):
            lines += ["", "".join(_ansi(text, shade) for text, shade in
                                  zip(explanation.texts, shades(part.added_T)))]
        elif _moved(part):
            order = np.argsort(-np.abs(part.added_T), kind="stable")[:_TOP]
            lines += ["  most:"] + [
                f"    {part.added_T[place]:+.4f}  token {place:<5} {explanation.texts[place]!r}"
                for place in order]
        elif len(part.added_T):
            lines.append(f"  every token {part.added_T[0]:+.4f}")
    return "\n".join(lines)


def _ansi(text, shade):
    """Shades a token towards blue or red on a dark ground, white on it."""
    ground = 24
    mixed = [round(ground + (end - ground) * abs(shade)) for end in (_BLUE if shade > 0 else _RED)]
    code = f"\x1b[38;2;240;240;240;48;2;{mixed[0]};{mixed[1]};{mixed[2]}m"
    # Colour must not run to the right end of a line.
    visible = "".join(c for c in shown(text) if c == "\n" or c == "\t" or c.isprintable())
    return "\n".join(f"{code}{piece}\x1b[0m" if piece else "" for piece in visible.split("\n"))
