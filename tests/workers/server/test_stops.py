from workers.server.answer import StopStrings


def said(stops, *pieces):
    return [stops.push(piece) for piece in pieces]


def test_a_stop_string_is_found_across_pieces_and_is_not_said():
    stops = StopStrings(["END", "X"])

    assert said(stops, "abE", "N", "Dx") == ["a", "b", ""]
    assert stops.stop == "END"
    assert stops.end() == ""


def test_what_only_begins_like_a_stop_string_is_said_later():
    stops = StopStrings(["END"])

    assert said(stops, "aEN", "E", "N!") == ["a", "E", "NE"]
    assert said(stops, "zEN") == ["N!z"]
    assert stops.end() == "EN"
    assert stops.stop is None


def test_the_first_of_several_counts():
    stops = StopStrings(["later", "b"])

    assert said(stops, "ab later") == ["a"]
    assert stops.stop == "b"
