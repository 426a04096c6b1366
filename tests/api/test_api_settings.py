import pytest

from memcalib_jax.api import ChatSettings, read_api_key

LOCAL = "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize(
    "url, kept",
    [
        (LOCAL, LOCAL),
        (LOCAL + "/", LOCAL),
        (" https://api.deepseek.com/v1 ", "https://api.deepseek.com/v1"),
        ("https://host/some/path/v1", "https://host/some/path/v1"),
        ("http://[::1]:80/v1", "http://[::1]:80/v1"),
    ],
)
def test_base_url(url, kept):
    assert ChatSettings(url, "m").base_url == kept


@pytest.mark.parametrize(
    "url, said",
    [
        ("", "must start with http"),
        ("api.deepseek.com/v1", "must start with http"),
        ("ftp://host/v1", "must start with http"),
        ("http:///v1", "must start with http"),
        ("https://api.deepseek.com", "must end in /v1"),
        ("https://host/v1/chat/completions", "must end in /v1"),
        ("https://host/v1?key=abc", "MEMCALIB_JUDGE_API_KEY"),
        ("https://user:secret@host/v1", "MEMCALIB_JUDGE_API_KEY"),
        ("http://host:99999999/v1", "is not a URL"),
        ("http://[::1/v1", "is not a URL"),
        ("http://host\x00/v1", "is not a URL"),
        ("http://☃☃.☃/v1", "is not a URL"),
        (None, "is not a URL"),
    ],
)
def test_bad_base_url(url, said):
    with pytest.raises(ValueError, match=said) as caught:
        ChatSettings(url, "m")
    assert "base_url" in str(caught.value)
    assert "secret" not in str(caught.value) and "abc" not in str(caught.value)


@pytest.mark.parametrize(
    "field, value",
    [
        ("model", ""),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("timeout", 0.0),
        ("timeout", float("inf")),
        ("timeout", float("nan")),
        ("max_tokens", 0),
        ("max_attempts", 0),
        ("max_attempts", 1.5),
        ("max_concurrent", -1),
        ("requests_per_minute", 0),
        ("thinking_off", "maybe"),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ],
)
def test_out_of_range(field, value):
    with pytest.raises(ValueError, match=field):
        ChatSettings(**{"base_url": LOCAL, "model": "m", field: value})


@pytest.mark.parametrize(
    "url, field",
    [
        ("https://api.deepseek.com/v1", "thinking"),
        ("https://api.openai.com/v1", "reasoning_effort"),
        (LOCAL, "chat_template_kwargs"),
        ("http://10.0.0.5:8000/v1", "chat_template_kwargs"),
    ],
)
def test_thinking_field_by_host(url, field):
    assert ChatSettings(url, "m").thinking_field == field


@pytest.mark.parametrize(
    "host, expected",
    [
        ("127.0.0.1", True),
        ("127.8.9.1:80", True),
        ("localhost:80", True),
        ("[::1]", True),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
    ],
)
def test_loopback(host, expected):
    assert ChatSettings(f"https://{host}/v1", "m").is_loopback is expected


@pytest.mark.parametrize("key", ["", "  \n"])
def test_remote_https_needs_a_key(key):
    settings = ChatSettings("https://api.deepseek.com/v1", "m")
    with pytest.raises(ValueError, match="set the environment variable MEMCALIB_JUDGE_API_KEY"):
        read_api_key(settings, {"MEMCALIB_JUDGE_API_KEY": key})


def test_key_is_stripped_and_optional_here():
    assert read_api_key(ChatSettings(LOCAL, "m"), {}) is None
    assert read_api_key(ChatSettings(LOCAL, "m"), {"MEMCALIB_JUDGE_API_KEY": " k\n"}) == "k"


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "ключ", "tab\there"])
def test_key_that_no_header_can_hold(key):
    with pytest.raises(ValueError, match="MEMCALIB_JUDGE_API_KEY") as caught:
        read_api_key(ChatSettings(LOCAL, "m"), {"MEMCALIB_JUDGE_API_KEY": key})
    assert key not in str(caught.value)


def test_another_variable_may_hold_the_key():
    settings = ChatSettings("https://host/v1", "m", key_variable="OTHER_KEY")
    assert read_api_key(settings, {"OTHER_KEY": "k", "MEMCALIB_JUDGE_API_KEY": "j"}) == "k"
    with pytest.raises(ValueError, match="set the environment variable OTHER_KEY"):
        read_api_key(settings, {"MEMCALIB_JUDGE_API_KEY": "j"})
    with pytest.raises(ValueError, match="environment variable OTHER_KEY"):
        ChatSettings("https://user@host/v1", "m", key_variable="OTHER_KEY")
