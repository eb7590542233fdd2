from __future__ import annotations

import subprocess
import sys

LIFE = """
import gc, weakref
from cluster.collector import hold, keep

class Link:
    pass

def cycle():
    one = Link()
    one.itself = one
    return weakref.ref(one)

hold()
assert not gc.isenabled()
modules = [Link() for _ in range(5000)]
lost = cycle()
keep()
assert gc.isenabled() and gc.get_freeze_count() > 5000
gc.collect()
assert lost() is not None, "what there was is not looked through"
later = cycle()
gc.collect()
assert later() is None, "what came later is"

hold()
assert gc.get_freeze_count() == 0 and not gc.isenabled()
gc.collect()
assert lost() is None, "of a service that has ended nothing stays"
"""


def test_what_a_process_keeps_is_looked_through_no_more_until_its_service_changes() -> None:
    # In a process of its own: this one's garbage is to be collected.
    done = subprocess.run([sys.executable, "-c", LIFE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
