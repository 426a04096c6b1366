"""The words of the slots benchmark, and a tokenizer of one token a word."""

from memcalib_jax.data.prompts import SYSTEM_PROMPT

TOPICS = ("dinner", "travel", "gift", "music", "study", "garden")
"""What a question asks about."""

VALUES = {
    "drink": ("tea", "coffee", "milk", "juice"),
    "pet": ("cat", "dog", "rabbit", "parrot"),
    "city": ("paris", "lima", "oslo", "cairo"),
    "sport": ("tennis", "rowing", "judo", "golf"),
    "color": ("red", "blue", "green", "black"),
    "fruit": ("apple", "plum", "fig", "melon"),
    "metal": ("iron", "copper", "silver", "tin"),
    "tree": ("oak", "pine", "birch", "willow"),
    "tool": ("hammer", "saw", "drill", "chisel"),
    "game": ("chess", "poker", "go", "darts"),
    "cloth": ("wool", "silk", "linen", "denim"),
    "shape": ("circle", "square", "cone", "cube"),
    "month": ("march", "june", "august", "october"),
    "spice": ("mint", "curry", "basil", "clove"),
    "bird": ("owl", "heron", "crow", "swan"),
    "gem": ("ruby", "opal", "jade", "topaz"),
    "dance": ("tango", "waltz", "salsa", "polka"),
    "job": ("nurse", "baker", "pilot", "tailor"),
}
"""The keys that an atom may be about, and the values of each: no word has two keys."""

KEYS = tuple(VALUES)

DEFAULTS = {
    "dinner": (("soup", "bread"), ("fresh", "quick")),
    "travel": (("train", "hotel"), ("near", "cheap")),
    "gift": (("book", "card"), ("small", "kind")),
    "music": (("radio", "guitar"), ("calm", "loud")),
    "study": (("notes", "quiz"), ("early", "short")),
    "garden": (("grass", "roses"), ("sunny", "neat")),
}
"""What stands in the decision's two slots, and in the support's, where no memory belongs there."""

FILLERS = ("well", "sure", "okay", "right", "now", "hmm", "fine", "yes")
CONNECTORS = ("your", "the", "this", "that")
DECISION, BORDER, SUPPORT = "choose", ";", "since"

PAD, UNKNOWN, ANSWER, END = "<pad>", "<unk>", "<answer>", "<end>"
_PROMPT_WORDS = ("Memories:", "(none)", "Question:", "[1]", "[2]", "[3]", "[4]")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}" + ANSWER + "{% endif %}")


def words() -> list[str]:
    """Returns every token, in the order of its id; the standing instructions are one token."""
    return [
        PAD, UNKNOWN, ANSWER, END, SYSTEM_PROMPT, *_PROMPT_WORDS, DECISION, BORDER, SUPPORT,
        *TOPICS, *KEYS, *(value for values in VALUES.values() for value in values),
        *(word for slots in DEFAULTS.values() for pair in slots for word in pair),
        *FILLERS, *CONNECTORS]


def build_tokenizer():
    """Returns a transformers tokenizer with one token a word and a chat template.

    The prompts are the library's own, word for word. Their standing instructions, which say
    nothing to so small a model, are one token.
    """
    # Imported here since it takes a second.
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: index for index, word in enumerate(words())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([
        AddedToken(word, normalized=False, special=True)
        for word in (PAD, UNKNOWN, ANSWER, END, SYSTEM_PROMPT)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, eos_token=END,
        chat_template=_CHAT_TEMPLATE, clean_up_tokenization_spaces=False)
