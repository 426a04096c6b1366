"""The formats of LongMemEval, MSC-Self-Instruct and MemBench, by records of our own."""

import json

import pytest

from memcalib_jax.data import RecordError
from memcalib_jax.memory.formats import (
    LOADERS, load_longmemeval, load_membench, load_msc_self_instruct)


def longmemeval():
    return {
        "question_id": "q1", "question_type": "knowledge-update", "question": "Where do I live?",
        "answer": "Porto", "question_date": "2023/06/01 (Thu) 10:00",
        "haystack_session_ids": ["b", "a"],
        "haystack_dates": ["2023/05/20 (Sat) 09:00", "2023/04/11 (Tue) 03:08"],
        "haystack_sessions": [
            [{"role": "user", "content": "I moved to Porto.", "has_answer": True},
             {"role": "assistant", "content": "Congratulations."}],
            [{"role": "assistant", "content": "Hello.", "has_answer": False},
             {"role": "user", "content": "I live in Lisbon.", "has_answer": True}]],
        "answer_session_ids": ["a", "b"]}


def msc():
    return {
        "personas": [["I like jazz."], []], "metadata": {"session_id": 4},
        "dialog": [{"id": "Speaker 2", "text": "Hello again.", "convai2_id": "x"}],
        "previous_dialogs": [
            {"personas": [[], []], "dialog": [{"text": "My dog is Rex."}, {"text": "Lovely."}],
             "time_num": 7, "time_unit": "days", "time_back": "7 days 2 hours ago"},
            {"personas": [[], []], "dialog": [{"text": "Hi."}], "time_num": 2,
             "time_unit": "hours"}],
        "self_instruct": {"B": "What was my dog called?", "A": "Rex!"}}


def membench():
    def message(name, step, text):
        keys = {"sid": ("user_message", "assistant_message"), "mid": ("user", "assistant")}[name]
        return {name: step, keys[0]: text, keys[1]: "Noted.", "time": "'2024-10-01 08:00'",
                "place": "Boston"}

    return {
        "Single-hop": [{"tid": 1, "message_list": [
            [message("sid", 0, "Hi."), message("sid", 1, "My sister is a nurse.")],
            [message("sid", 0, "Rain again.")]],
            "QA": {"qid": 0, "question": "What is her job?", "answer": "Nurse",
                   "ground_truth": "B", "choices": {"A": "Pilot", "B": "Nurse"},
                   "target_step_id": [[1, 0], [0, 1], [1, 0], [9, 9]],
                   "time": "'2024-10-02 08:00'"}}],
        "Emotion": [{"tid": 2, "message_list": [[message("mid", 0, "I am glad.")]], "QA": {}}]}


def load(tmp_path, loader, value):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(value, indent=2 if loader is load_membench else None))
    return loader(path)


def test_longmemeval_in_the_order_of_dates(tmp_path):
    conversation, = load(tmp_path, load_longmemeval, [longmemeval()])
    assert (conversation.id, conversation.speakers) == ("q1", ("user", "assistant"))
    assert [(session.number, session.time) for session in conversation.sessions] == [
        (1, "2023/04/11 (Tue) 03:08"), (2, "2023/05/20 (Sat) 09:00")]
    assert [(turn.dia_id, turn.speaker, turn.text) for turn in conversation.sessions[0].turns] == [
        ("D1:1", "assistant", "Hello."), ("D1:2", "user", "I live in Lisbon.")]
    question, = conversation.questions
    assert (question.text, question.answer, question.category) == (
        "Where do I live? (Asked on 2023/06/01 (Thu) 10:00.)", "Porto", "knowledge-update")
    assert (set(question.evidence), question.last_session) == ({"D1:2", "D2:1"}, 2)
    assert question.scored


def test_longmemeval_without_an_answer_counts_in_the_last_session(tmp_path):
    row = longmemeval() | {"question_id": "q1_abs", "answer": 3}
    for session in row["haystack_sessions"]:
        for turn in session:
            turn.pop("has_answer", None)
    question, = load(tmp_path, load_longmemeval, [row])[0].questions
    assert (question.category, question.answer, question.evidence) == ("abstention", "3", ())
    assert (question.scored, question.last_session) == (True, 2)


def test_msc_speakers_take_turns_and_the_present_dialog_is_last(tmp_path):
    conversation, = load(tmp_path, load_msc_self_instruct, msc())
    assert [(s.time, [(t.dia_id, t.speaker, t.text) for t in s.turns])
            for s in conversation.sessions] == [
        ("7 days 2 hours ago", [("D1:1", "Speaker 1", "My dog is Rex."),
                                ("D1:2", "Speaker 2", "Lovely.")]),
        ("2 hours ago", [("D2:1", "Speaker 1", "Hi.")]),
        ("now", [("D3:1", "Speaker 2", "Hello again.")])]
    question, = conversation.questions
    assert (question.text, question.answer) == ("What was my dog called?", "Rex!")
    assert conversation.questions_until(2) == []
    assert conversation.questions_until(3) == [question]


def test_membench_messages_are_two_turns_and_targets_name_the_users(tmp_path):
    conversation, silent = load(tmp_path, load_membench, membench())
    assert [(t.dia_id, t.speaker, t.text) for t in conversation.sessions[0].turns] == [
        ("D1:1", "user", "Hi."), ("D1:2", "assistant", "Noted."),
        ("D1:3", "user", "My sister is a nurse."), ("D1:4", "assistant", "Noted.")]
    question, = conversation.questions
    assert (question.text, question.answer, question.category, question.evidence) == (
        "What is her job? (Asked on 2024-10-02 08:00.)", "Nurse", "Single-hop",
        ("D1:3", "D2:1"))
    assert conversation.sessions[0].time == "2024-10-01 08:00"
    assert silent.questions == ()
    assert silent.sessions[0].turns[0].text == "I am glad."


def without(value, *path):
    for key in path[:-1]:
        value = value[key]
    value.pop(path[-1])


@pytest.mark.parametrize("loader, make, change, message", [
    (load_longmemeval, longmemeval, lambda v: v["haystack_dates"].pop(), "2 sessions .* 1 dates"),
    (load_longmemeval, longmemeval, lambda v: without(v, "answer"), "answer: must be a text"),
    (load_longmemeval, longmemeval, lambda v: v["haystack_sessions"][0][1].update(role="system"),
     r"haystack_sessions\[0\]\[1\].role: must be user or assistant"),
    (load_longmemeval, longmemeval, lambda v: v.update(haystack_dates=[], haystack_sessions=[]),
     "no session with a turn"),
    (load_msc_self_instruct, msc, lambda v: without(v, "self_instruct", "B"),
     r"line 1, .*self_instruct.B: is missing"),
    (load_msc_self_instruct, msc, lambda v: v["dialog"][0].update(id="Speaker 3"),
     r"dialog\[0\].id: must be Speaker 1 or Speaker 2"),
    (load_msc_self_instruct, msc, lambda v: without(v, "previous_dialogs", 0, "dialog", 1, "text"),
     r"previous_dialogs\[0\].dialog\[1\].text: is missing"),
    (load_membench, membench, lambda v: without(v, "Single-hop", 0, "QA", "answer"),
     r"Single-hop\[0\].QA.answer: must be a text"),
    (load_membench, membench, lambda v: v["Single-hop"][0]["QA"].update(target_step_id=[0]),
     "target_step_id: must hold pairs"),
    (load_membench, membench, lambda v: without(v, "Emotion", 0, "message_list", 0, 0, "user"),
     r"message_list\[0\]\[0\].user_message: is missing"),
])
def test_malformed_files_are_refused_by_place(tmp_path, loader, make, change, message):
    value = make()
    change(value)
    with pytest.raises(RecordError, match=message):
        load(tmp_path, loader, [value] if loader is load_longmemeval else value)


def test_every_benchmark_has_a_loader():
    assert list(LOADERS) == ["locomo", "longmemeval", "msc_self_instruct", "membench"]
