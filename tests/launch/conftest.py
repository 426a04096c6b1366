"""The small model, records and judge of the programs' tests."""

import importlib.util
import pathlib

_path = pathlib.Path(__file__).parents[1] / "experiments" / "conftest.py"
_spec = importlib.util.spec_from_file_location("fixtures_of_experiments", _path)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

tiny_model_dir, records_file = _module.tiny_model_dir, _module.records_file
judge_url = _module.judge_url
