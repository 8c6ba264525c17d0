from contracts.topics import Topics
from infra.topics import Existing, missing_topics, topic_problems

_WANTED = Topics("p", partitions=8, worker_slots=64).specs(["default"])


def _existing(**partitions: int) -> dict[str, Existing]:
    whole = {s.name: Existing(s.partitions, s.max_message_bytes) for s in _WANTED}
    return whole | {f"p.{name}": Existing(count) for name, count in partitions.items()}


def test_everything_is_missing_on_an_empty_broker() -> None:
    assert missing_topics(_WANTED, {}) == _WANTED
    assert topic_problems(_WANTED, {}) == []


def test_topics_as_they_must_be_need_nothing() -> None:
    assert missing_topics(_WANTED, _existing()) == []
    assert topic_problems(_WANTED, _existing()) == []


def test_too_few_partitions_name_the_topic_and_both_numbers() -> None:
    problems = topic_problems(_WANTED, _existing(requests=3, outcomes=7))
    assert problems == [
        "topic p.requests has 3 partitions, 8 are needed",
        "topic p.outcomes has 7 partitions, 8 are needed",
    ]


def test_more_partitions_are_fine() -> None:
    assert topic_problems(_WANTED, _existing(requests=9)) == []


def test_a_smaller_record_limit_is_a_problem_and_an_unknown_one_is_not() -> None:
    smaller = _existing() | {"p.requests": Existing(8, 1_000_000)}
    assert topic_problems(_WANTED, smaller) == [
        "topic p.requests takes records of 1000000 bytes (max.message.bytes), 8388608 are needed"
    ]
    assert topic_problems(_WANTED, _existing() | {"p.requests": Existing(8, None)}) == []


def test_workers_share_no_partition_and_leave_none_out() -> None:
    topics = Topics("p", worker_slots=5, worker_partitions=3)
    (dispatch,) = (s for s in topics.specs(["default"]) if s.name == topics.dispatch("default"))
    read = [partition for slot in range(5) for partition in topics.partitions_of(slot)]
    assert read == list(range(dispatch.partitions))


def test_a_request_has_one_partition_of_its_worker_s_and_requests_have_all() -> None:
    topics = Topics("p", worker_slots=5, worker_partitions=3)
    used = {topics.partition_for(2, f"chatcmpl-{n}") for n in range(100)}
    assert used == set(topics.partitions_of(2))
    assert topics.partition_for(2, "chatcmpl-1") == topics.partition_for(2, "chatcmpl-1")
