"""Names on the hub, against a small hub that is served on this machine."""

import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import urllib.parse

import pytest

from memcalib_jax import hub
from memcalib_jax.data import RecordError, load_records, sample_path
from memcalib_jax.models import ModelError, load_config, load_tokenizer

ROOT = pathlib.Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = {
    "config.json": b"{}", "generation_config.json": b"{}", "model.safetensors": b"weights",
    "tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}", "merges.txt": b"a b",
    "README.md": b"read me", "pytorch_model.bin": b"again", "consolidated.safetensors": b"again",
    "onnx/config.json": b"{}", "original/model.safetensors": b"again"}
NEEDED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
          "chat_template.jinja", "merges.txt"}
REPOSITORIES = {
    "models/tiny/llama": MODEL,
    "datasets/tiny/records": {"data/test.jsonl": sample_path("records.jsonl").read_bytes()}}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does to what huggingface_hub asks of it."""

    def do_HEAD(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")
        if path.startswith("api/"):
            return self._about(path.removeprefix("api/"))
        kind = "" if path.startswith("datasets/") else "models/"
        name, _, rest = (kind + path).partition("/resolve/")
        revision, _, file = rest.partition("/")
        if self._known(name, revision):
            if file in REPOSITORIES[name]:
                self._send(200, REPOSITORIES[name][file], {"ETag": f'"{hash((name, file))}"'})
            else:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_GET = do_HEAD

    def _about(self, path):
        name, _, revision = path.replace("/tree/", "/revision/").partition("/revision/")
        if not self._known(name, revision):
            return
        answer = {"id": name.partition("/")[2], "sha": COMMIT, "siblings": []}
        if "/tree/" in path:
            answer = [{"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
                      for file, content in REPOSITORIES[name].items()]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _known(self, name, revision):
        if name == "models/tiny/gated":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif name not in REPOSITORIES:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", COMMIT):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _send(self, status, content, headers):
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, "Content-Length": len(content),
                           **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


# Where the hub is, and whether there is a network, is read once a process.
PROGRAM = """
import json, sys
from memcalib_jax import hub
answers = []
for function, name in json.loads(sys.argv[1]):
    try:
        answers.append(str(getattr(hub, function)(name)))
    except hub.HubError as error:
        answers.append("refused: " + str(error))
print(json.dumps(answers))
"""


def ask(cache, questions, **environment):
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                   "HF_TOKEN": "hf_secret"} | environment
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(questions)], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert "hf_secret" not in process.stdout + process.stderr
    return json.loads(process.stdout)


NAMES = {
    "model": ("model_folder", "tiny/llama"),
    "revision": ("model_folder", "tiny/llama@v1"),
    "file": ("data_file", "hf://datasets/tiny/records/data/test.jsonl"),
    "file_revision": ("data_file", "hf://datasets/tiny/records@v1/data/test.jsonl"),
    "no_model": ("model_folder", "tiny/qwen"),
    "no_revision": ("model_folder", "tiny/llama@v2"),
    "gated": ("model_folder", "tiny/gated"),
    "no_dataset": ("data_file", "hf://datasets/tiny/none/test.jsonl"),
    "no_file": ("data_file", "hf://datasets/tiny/records/train.jsonl"),
    "no_file_revision": ("data_file", "hf://datasets/tiny/records@v2/data/test.jsonl"),
    "bad_url": ("data_file", "hf://datasets/tiny"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def answers(cache):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found = ask(cache, list(NAMES.values()), HF_HUB_OFFLINE="0",
                HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    return dict(zip(NAMES, found, strict=True))


def test_a_model_comes_with_what_it_needs_and_no_more(answers):
    folder = pathlib.Path(answers["model"])
    files = {str(path.relative_to(folder)): path.read_bytes()
             for path in folder.rglob("*") if path.is_file()}
    assert files == {name: MODEL[name] for name in NEEDED}
    assert answers["revision"] == answers["model"]


def test_a_data_file_is_read_from_the_cache(answers):
    assert load_records(answers["file"]) == load_records(sample_path("records.jsonl"))
    assert answers["file_revision"] == answers["file"]


@pytest.mark.parametrize("case, parts", [
    ("no_model", ["tiny/qwen: ", "nothing of that name on the hub", "hf auth login"]),
    ("no_revision", ["tiny/llama@v2: ", "no revision v2"]),
    ("gated", ["tiny/gated: ", "consent", "HF_TOKEN"]),
    ("no_dataset", ["tiny/none", "nothing of that name on the hub"]),
    ("no_file", ["train.jsonl: tiny/records is on the hub, but holds no such file"]),
    ("no_file_revision", ["no revision v2"]),
    ("bad_url", ["hf://datasets/tiny: give hf://datasets/OWNER/NAME/FILE"]),
])
def test_what_the_hub_has_not_is_refused_in_words(answers, case, parts):
    assert answers[case].startswith("refused: ")
    for part in parts:
        assert part in answers[case]


def test_offline_the_cache_serves(answers, cache):
    model, file, no_model, no_file = ask(
        cache, [NAMES[name] for name in ("model", "file", "no_model", "no_file")],
        HF_HUB_OFFLINE="1")
    assert (model, file) == (answers["model"], answers["file"])
    assert "`hf download tiny/qwen --local-dir DIR`" in no_model
    assert ("`hf download tiny/records train.jsonl --repo-type dataset --local-dir DIR`"
            in no_file)
    assert "HF_HUB_OFFLINE" in no_model


def test_a_hub_out_of_reach_is_said_to_be(cache):
    answer, = ask(cache, [NAMES["no_model"]], HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub is out of reach" in answer and "`hf download tiny/qwen" in answer


@pytest.mark.parametrize("name, is_one", [
    ("Qwen/Qwen3-8B", True), ("Qwen/Qwen3-8B@main", True), ("mistralai/Ministral-3-8B.x_1", True),
    ("/models/Qwen3-8B", False), ("./Qwen/Qwen3", False), ("../x", False), ("Qwen3-8B", False),
    ("runs/models/qwen", False), ("models/smollm2.gguf", False), ("~/model", False)])
def test_which_names_may_be_on_the_hub(name, is_one):
    assert hub.is_model_name(name) == is_one


@pytest.mark.parametrize("function", [load_config, load_tokenizer])
def test_models_are_looked_for_on_the_hub(function):
    with pytest.raises(ModelError, match="`hf download Nobody/Nothing-1B --revision v3 --local"):
        function("Nobody/Nothing-1B@v3")


def test_a_folder_here_comes_before_the_hub(tmp_path, monkeypatch):
    (tmp_path / "Nobody" / "Nothing-1B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no config.json"):
        load_config("Nobody/Nothing-1B")


def test_records_are_looked_for_on_the_hub():
    with pytest.raises(RecordError, match="`hf download Nobody/Data a/b.jsonl --repo-type dataset"):
        load_records("hf://datasets/Nobody/Data/a/b.jsonl")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-", "Qwen/Qwen..3"])
def test_a_name_that_the_hub_does_not_allow(name):
    with pytest.raises(ModelError, match=f"{name}: .* here, and the hub allows no such name"):
        load_config(name)
