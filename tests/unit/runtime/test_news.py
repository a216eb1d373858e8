from orchestrator.runtime.news import Feed


def test_a_feed_gives_all_since_a_position_and_forgets_what_was_before() -> None:
    feed: Feed[str] = Feed()
    assert (len(feed), feed.last, feed.since(0)) == (0, None, ())
    feed.extend("ab")
    assert feed.since(0) == ("a", "b")
    assert feed.since(0) == ("a", "b")  # nobody has said that they came through
    feed.append("c")
    assert feed.since(2) == ("c",)
    assert feed.since(3) == ()
    assert (len(feed), feed.last) == (3, "c")
    feed.append("d")
    assert feed.since(3) == ("d",)
