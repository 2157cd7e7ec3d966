"""A reply is fetched as far as it can be a proper one: Flower's own grid, over answers by hand."""

import gc
import json
import random
import tracemalloc
from collections import Counter

import httpx
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedbayes.errors import MessageError
from fedbayes.flower import superlink
from fedbayes.flower.fetching import ENVELOPE, fetch, longest_reply
from fedbayes.flower.wire import bytes_record

MB = 1_000_000


class SuperLink(httpx.BaseTransport):
    """Answers what a grid asks about one message, and counts the bytes of bodies that were read."""

    def __init__(self, message, *, objects=None, tree=None, said=None):
        self.message = message_to_proto(remove_content_from_message(message))
        found = get_all_nested_objects(message)
        self.objects = {name: item.deflate() for name, item in found.items()} | (objects or {})
        self.tree = tree or get_object_tree(message)
        self.said = said
        self.read, self.asked = 0, Counter()

    def handle_request(self, request):
        what = request.url.path.rpartition("/")[2]
        self.asked[what] += 1
        if what == "pull-messages":
            answer = PullAppMessagesResponse(
                messages_list=[self.message], message_object_trees=[self.tree]
            )
        elif what == "pull-object":
            name = PullObjectRequest.FromString(request.content).object_id
            answer = PullObjectResponse(
                object_found=True, object_available=True, object_content=self.objects[name]
            )
        else:
            answer = ConfirmMessageReceivedResponse()
        content = answer.SerializeToString()
        headers = {"content-length": str(len(content))}
        if self.said == "nothing":
            headers = {}
        return httpx.Response(200, headers=headers, stream=Body(self, content))


class Body(httpx.SyncByteStream):
    def __init__(self, link, content):
        self.link, self.content = link, content

    def __iter__(self):
        for start in range(0, len(self.content), 65536):
            self.link.read += len(self.content[start : start + 65536])
            yield self.content[start : start + 65536]


@pytest.fixture
def grid():
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1

    def made(link):
        client = RuntimeHttpClient.from_server_address("127.0.0.1:1", True, None, [])
        client._client = httpx.Client(transport=link)
        found = HttpGrid(token="t")
        found._client = client
        found.set_run(Run.create_empty(run_id=1))
        return found

    return made


def reply(content):
    message = Message(content, 7, "train.round", ttl=60)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def report(data):
    return reply(RecordDict({"report": bytes_record(data)}))


@pytest.mark.parametrize("size", [0, 10, 100_000, 12 * MB])
def test_a_proper_reply_comes_whole(size, grid):
    data = bytes(range(256)) * (size // 256)
    link = SuperLink(report(data))
    found = fetch(grid(link), "1", longest_reply(len(data)))
    assert found.content.array_records["report"]["bytes"].data == data
    assert link.asked["confirm-message-received"] == 1


@pytest.mark.slow
def test_a_reply_is_joined_with_fewer_copies_than_flowers_own_way_has(grid):
    data = random.Random(1).randbytes(40 * MB)
    ways = {
        "Flower": lambda grid: next(iter(grid.pull_messages(["1"]))),
        "ours": lambda grid: fetch(grid, "1", longest_reply(len(data))),
    }
    most = {}
    for name, way in ways.items():
        asked = grid(SuperLink(report(data)))
        gc.collect()
        tracemalloc.start()
        found = way(asked)
        most[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found.content["report"]["bytes"].data == data
    assert most["ours"] < most["Flower"] - 0.8 * len(data)


def test_pieces_that_are_the_same_count_as_often_as_they_stand(grid):
    """Zeros are stored once, and are a report of their whole length."""
    data = bytes(20 * MB)
    found = fetch(grid(SuperLink(report(data))), "1", longest_reply(len(data)))
    assert found.content.array_records["report"]["bytes"].data == data
    with pytest.raises(MessageError, match="longer than"):
        fetch(grid(SuperLink(report(data))), "1", longest_reply(19 * MB))


@pytest.mark.parametrize("said", [None, "nothing"])
def test_a_reply_that_is_too_long_is_not_fetched(said, grid):
    """No more is read than a proper reply has, or a piece more where lengths are not told."""
    link = SuperLink(report(bytes(range(256)) * 120_000), said=said)
    with pytest.raises(MessageError, match="longer than the limit of 141,172 bytes"):
        fetch(grid(link), "1", longest_reply(10_000))
    assert link.read < (12 * MB if said else ENVELOPE)
    assert not link.asked["confirm-message-received"]


@pytest.mark.slow
def test_one_object_that_is_too_long_is_not_read(grid):
    words = RecordDict({"about": ConfigRecord({"ticket": bytes(50 * MB)})})
    link = SuperLink(reply(words))
    with pytest.raises(MessageError, match="longer than"):
        fetch(grid(link), "1", longest_reply(1000))
    assert link.read < ENVELOPE


def test_many_objects_are_not_asked_for(grid):
    message = report(b"abc")
    tree = get_object_tree(message)
    tree.children.extend(ObjectTree(object_id=f"{n:064x}") for n in range(2_000))
    link = SuperLink(message, tree=tree)
    with pytest.raises(MessageError, match=r"has 2,\d+ objects"):
        fetch(grid(link), "1", longest_reply(1000))
    assert not link.asked["pull-object"]


def bomb(times):
    """A reply whose arrays name one piece of 100 kB so many times: a hundred kilobytes to send."""
    message = report(bytes(100_000))
    objects = {name: item.deflate() for name, item in get_all_nested_objects(message).items()}
    ids = {}
    for name, content in list(objects.items()):
        ids[content.split(b" ", 1)[0]] = name
    array = objects[ids[b"Array"]]
    body = json.dumps(
        {
            "dtype": "uint8",
            "shape": [1],
            "stype": "fedbayes",
            "arraychunk_ids": [0] * times,
        }
    ).encode()
    head = array.split(b"\0", 1)[0].rsplit(b" ", 1)[0] + f" {len(body)}".encode()
    return message, ids, head + b"\0" + body


def test_a_piece_that_is_named_many_times_is_not_joined(grid):
    message, ids, content = bomb(10_000)
    link = SuperLink(message, objects={ids[b"Array"]: content})
    with pytest.raises(MessageError, match="longer than"):
        fetch(grid(link), "1", longest_reply(200_000))
    assert link.read < 400_000


def test_an_array_of_arrays_is_not_joined(grid):
    """Each of them may be as long as a report, and is short where it is named."""
    message = report(b"abc")
    objects = {name: item.deflate() for name, item in get_all_nested_objects(message).items()}
    (inner,) = (name for name, content in objects.items() if content.startswith(b"Array "))
    (piece,) = (name for name, content in objects.items() if content.startswith(b"ArrayChunk "))
    body = objects[inner].split(b"\0", 1)[1].replace(b"[0]", b"[0, 0, 0]")
    outer = b"Array %s %d\0" % (inner.encode(), len(body)) + body
    tree = get_object_tree(message)
    record = next(
        t for t in iterate_object_tree(tree) if t.children and t.children[0].object_id == inner
    )
    record.children[0].CopyFrom(
        ObjectTree(
            object_id="f" * 64,
            children=[ObjectTree(object_id=inner, children=[ObjectTree(object_id=piece)])],
        )
    )
    named = {record.object_id: objects[record.object_id].replace(inner.encode(), b"f" * 64)}
    link = SuperLink(message, objects={**named, "f" * 64: outer}, tree=tree)
    with pytest.raises(MessageError, match="not made of pieces"):
        fetch(grid(link), "1", longest_reply(1000))


def test_a_reply_that_is_not_there_yet(grid):
    link = SuperLink(report(b"abc"))
    link.handle_request = lambda _: httpx.Response(200, content=b"")
    assert fetch(grid(link), "1", 1000) is None


def test_objects_that_are_none_are_no_reply(grid):
    message = report(b"abc")
    content = b"Array nonsense"
    name = next(n for n in get_all_nested_objects(message))
    link = SuperLink(message, objects={name: content})
    assert get_object_id(content) != name
    with pytest.raises(Exception, match=r".+"):
        fetch(grid(link), "1", longest_reply(1000))


def test_another_grid_is_asked_as_ever():
    class Grid:
        def pull_messages(self, numbers):
            return [f"the reply to {number}" for number in numbers]

    assert fetch(Grid(), "7", 1) == "the reply to 7"


def test_a_piece_that_arrays_share_counts_for_each(grid):
    """Many arrays may share a piece: each of them is joined."""
    data = bytes(100_000)
    record = ArrayRecord({str(n): Array("uint8", (n + 1,), "fedbayes", data) for n in range(20)})
    link = SuperLink(reply(RecordDict({"report": record})))
    with pytest.raises(MessageError, match="longer than"):
        fetch(grid(link), "1", longest_reply(200_000))
    assert link.read < 400_000  # it is listed for each of them
    found = fetch(grid(link), "1", longest_reply(2 * MB))
    assert len(found.content.array_records["report"]) == 20


def test_a_superlink_that_is_busy_is_asked_again(grid):
    """Its database may be locked while a large message is written; a refusal is final."""
    link = SuperLink(report(b"abc"))
    answer, tries = link.handle_request, Counter()

    def busy(request):
        tries[request.url.path] += 1
        if tries[request.url.path] < 2:
            return httpx.Response(500, text="database is locked", request=request)
        return answer(request)

    link.handle_request = busy
    asked = grid(link)
    asked._runtime_client._retry_invoker = superlink.patient()
    found = fetch(asked, "1", longest_reply(3))
    assert found.content["report"]["bytes"].data == b"abc"
    assert min(tries.values()) == 2
    link.handle_request = lambda request: httpx.Response(403, request=request)
    with pytest.raises(httpx.HTTPStatusError):
        fetch(asked, "1", longest_reply(3))
