"""Lines that are written from a thread of their own."""

import logging
import subprocess
import sys

from app import output
from app.output import MAX_CHARACTERS, ErrHandler, Output

BLOCKED = """
import sys
from app import output
for number in range(30_000):
    output.OUT.write(f"{number:060}")
print("goes on", file=sys.stderr, flush=True)
sys.stdin.readline()
output.OUT.flush(30)
output.OUT.write("after")
output.OUT.flush(30)
"""


def test_a_pipe_that_nobody_reads_stops_nothing_and_what_it_missed_is_told():
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr
        assert process.stdout
        assert process.stderr.readline() == "goes on\n"
        out, err = process.communicate("\n", timeout=30)
    numbers = [int(line) for line in out.splitlines()[:-1]]
    assert numbers == list(range(len(numbers)))
    lost = 30_000 - len(numbers)
    assert lost > 0
    assert out.splitlines()[-1] == "after"
    assert f"{lost} lines of stdout were lost" in err


def test_lines_are_written_in_their_order(capsys):
    out = Output("stdout")
    for number in range(1000):
        out.write(str(number))
    out.flush()
    assert capsys.readouterr().out.splitlines() == [str(number) for number in range(1000)]


def test_the_log_of_a_process_goes_the_same_way(capsys):
    handler = ErrHandler()
    handler.handle(logging.makeLogRecord({"msg": "seen %s", "args": ("here",)}))
    output.ERR.flush()
    assert capsys.readouterr().err == "seen here\n"


def test_a_record_is_one_line_and_its_traceback_lies_farther_in(capsys):
    handler = ErrHandler("%(levelname)s %(message)s")
    try:
        raise ValueError("bad\nERROR forged \x9b31m")
    except ValueError:
        handler.handle(
            logging.makeLogRecord(
                {
                    "levelname": "ERROR",
                    "msg": "a worker %s failed",
                    "args": ("\u202e\nERROR forged",),
                    "exc_info": sys.exc_info(),
                }
            )
        )
    output.ERR.flush()
    said = capsys.readouterr().err
    first, *others = said.removesuffix("\n").split("\n")
    assert first == "ERROR a worker \\u202e\\u000aERROR forged failed"
    assert others[0] == "  Traceback (most recent call last):"
    assert others[-2:] == ["  ValueError: bad", "  ERROR forged \\u009b31m"]
    assert all(line.isprintable() for line in (first, *others))


def test_a_long_text_of_others_is_cut(capsys):
    handler = ErrHandler()
    try:
        raise ValueError("y" * 250_000)
    except ValueError:
        told = {"msg": "pods: %s", "args": ("x" * 250_000,), "exc_info": sys.exc_info()}
        handler.handle(logging.makeLogRecord(told))
    output.ERR.flush()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("pods: xxx")
    assert lines[-1].startswith("  ValueError: yyy")
    assert max(map(len, lines)) <= MAX_CHARACTERS + 2


def test_a_line_of_others_is_escaped(capsys):
    out = Output("stdout")
    out.write('{"path":"/\x9b2J\u202e\u2028"}')
    out.flush()
    assert capsys.readouterr().out == '{"path":"/\\u009b2J\\u202e\\u2028"}\n'
