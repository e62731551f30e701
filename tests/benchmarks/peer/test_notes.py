from __future__ import annotations

from benchmarks.peer.notes import marked, notes


def test_a_star_refers_to_the_note_of_a_scenario():
    assert (marked("many"), marked("large_vocabulary")) == ("many", "large_vocabulary *")
    found = notes(["many", "large_vocabulary"], ["steps", "rollouts"])
    assert "large_vocabulary *: " in found
    assert found.count("transfer to GPUs") == 3


def test_parts_that_did_not_run_have_no_notes():
    assert notes(["large_vocabulary"], ["rollouts"]).splitlines()[0].startswith("rollouts: ")
    assert "Triton" not in notes(["large_vocabulary"], ["rollouts"])
