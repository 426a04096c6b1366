"""A small conversation in the LoCoMo format."""

import pytest


@pytest.fixture
def row():
    """Two sessions, their keys out of order, and a question of each kind."""
    def turn(id, speaker, text, **more):
        return {"dia_id": id, "speaker": speaker, "text": text, **more}

    return {
        "sample_id": "c1",
        "conversation": {
            "speaker_a": "Ann", "speaker_b": "Ben",
            "session_10_date_time": "9:00 am on 2 May, 2024",
            "session_10": [turn("D10:1", "Ben", "I sold the boat.")],
            "session_2_date_time": "8:00 am on 1 May, 2024",
            "session_2": [
                turn("D2:1", "Ann", "Any news?"),
                turn("D2:2", "Ben", "I bought a boat.", blip_caption="a red boat", img_url=[]),
                turn("D2:3", "Ann", "Lovely!")],
            "session_11_date_time": "soon", "session_11": [], "session_12_date_time": "later"},
        "qa": [
            {"question": "What did Ben buy?", "answer": "A boat", "category": 4,
             "evidence": ["D2:2"]},
            {"question": "When was it sold?", "answer": 2024, "category": 2,
             "evidence": ["D2:02; D10:1", "D", "D:11:26"]},
            {"question": "Why?", "answer": "Unknown", "category": 3, "evidence": []},
            {"question": "What did Ann buy?", "adversarial_answer": "A boat", "category": 5,
             "evidence": ["D2:2"]}]}
