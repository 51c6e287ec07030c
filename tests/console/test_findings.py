from app.console.roster import findings
from app.core.check import Check

FAIL = Check("KvrouteRequestsFail", False, "86% of the requests fail", "see the last errors")
SLOW = Check("KvrouteSlowDecisions", False, "decisions take 229 ms", "give routers a core each")


def test_requests_that_fail_come_before_all_else_that_is_wrong():
    checks = [Check("redis", True, "answers", ""), Check("workers", False, "none", "start one")]
    rows = findings(checks, [SLOW, FAIL])
    assert [(row["name"], row["level"]) for row in rows] == [
        ("KvrouteRequestsFail", "bad"),
        ("workers", "bad"),
        ("KvrouteSlowDecisions", "warn"),
        ("redis", "ok"),
    ]
