from tools.sizes import package_sizes, total_sizes

FILES = {
    "app/core/types.py": "@dataclass(frozen=True)\nclass Key:\n    worker: str\n",
    "app/core/settings/router.py": "class Door(Struct):\n    port: int = setting(8000)\n",
    "app/core/settings/worker.py": "class Worker:\n    port: int = setting(8001)\n",
    "app/cli.py": "@click.option('--yes')\ndef reset(yes): ...\n",
    "workers/kv/slots.py": "class Slot(NamedTuple):\n    n: int\n",
    "tests/test_cli.py": "assert True\n",
    "docs/index.md": "two words\n",
}


def test_sizes_are_those_of_each_package():
    sizes = package_sizes(FILES)
    assert sizes["app/core"] == {"lines": 7, "records": 2, "settings": 2}
    assert sizes["workers/kv"] == {"lines": 2, "records": 1}


def test_totals_count_a_setting_of_two_processes_once():
    assert total_sizes(FILES) == {
        "app + workers": 11,
        "tests": 1,
        "words of docs": 2,
        "pages of docs": 1,
        "settings": 1,
        "flags": 2,
    }
