"""Scripts that hang and scripts that are slow, one process each: `activity_cases.py {hang,slow}`.

Prints one line of JSON per case. Imports neither JAX nor the package, so any Python can run it.
"""

import asyncio
import contextlib
import ctypes
import hashlib
import itertools
import json
import multiprocessing
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

_SOURCE = Path(__file__).parents[2] / "src" / "distributary"
if "distributary" not in sys.modules:  # stand in for packages that import JAX
    for name, path in (("distributary", _SOURCE), ("distributary.job", _SOURCE / "job")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path)]

from distributary.job._activity import Activity  # noqa: E402

BEAT_SECONDS = 0.03
STILL_BEATS = 12  # of a hang
SLOW_BEATS = 30  # looked at in slow work
DEADLINE_SECONDS = 60.0
NUM_AT_ONCE = 5
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

fork = multiprocessing.get_context("fork")
lock, other_lock = threading.Lock(), threading.Lock()
flag = threading.Event()
done = False
outside, feeder = os.pipe()  # the process that starts the cases is outside of them
server = socket.create_server(("127.0.0.1", 0))
FOREVER = 10_000


def start(target, *args):
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def start_child(target, *args):
    child = fork.Process(target=target, args=args, daemon=True)
    child.start()
    return child


def is_done():
    return done


def compiled_as(path, text, **names):
    exec(compile(text, path, "exec"), names)
    return names


# Hangs


def hang_queue_get():
    queue.Queue().get()


def hang_simple_queue_get():
    batches = queue.SimpleQueue()
    batch = batches.get()
    return batch


def hang_lock_taken_twice():
    lock.acquire()
    lock.acquire()


def hang_in_a_loop_that_has_turned_often():
    """Python calls functions in another way there."""
    for number in range(2000):
        lock.acquire()
        if number < 1000:
            lock.release()


def hang_with_a_lock():
    with lock, lock:
        pass


def hang_event_nobody_sets():
    threading.Event().wait()


def hang_condition_nobody_notifies():
    condition = threading.Condition()
    with condition:
        condition.wait_for(lambda: False)


def hang_barrier_without_the_others():
    threading.Barrier(3).wait()


def hang_semaphore():
    threading.Semaphore(0).acquire()


def hang_join_of_a_thread_that_waits():
    start(flag.wait).join()


def hang_locks_in_opposite_order():
    first_taken, second_taken = threading.Event(), threading.Event()

    def take_other():
        with other_lock:
            second_taken.set()
            first_taken.wait()
            with lock:
                pass

    start(take_other)
    with lock:
        first_taken.set()
        second_taken.wait()
        with other_lock:
            pass


def hang_endless_loop():
    while True:
        pass


def hang_endless_loop_with_calls():
    while not flag.is_set():
        is_done()


def hang_endless_loop_in_a_module():
    compiled_as("train.py", "done = False\nwhile not done:\n    pass")


def hang_endless_loop_that_yields():
    while not done:
        time.sleep(0)


def hang_endless_loop_of_system_calls():
    while not done:
        os.getppid()


def hang_polls_a_variable():
    while not done:
        time.sleep(0.01)


def hang_polls_with_a_sleep_of_another_name():
    compiled_as("train.py", "from time import sleep as rest\nwhile True:\n    rest(0.01)")


def hang_polls_a_function():
    def wait_for(predicate, period=0.02):
        while not predicate():
            time.sleep(period)

    wait_for(is_done)


def hang_polls_slowly():
    while not done:
        time.sleep(0.3)


def hang_polls_and_looks_at_the_clock():
    start_time = time.monotonic()
    while not done:
        now = time.monotonic()
        if now - start_time > FOREVER:
            raise TimeoutError
        time.sleep(0.01)


def hang_polls_an_event():
    while not flag.wait(0.02):
        pass


def hang_polls_a_queue():
    batches = queue.Queue()
    while True:
        try:
            batches.get(timeout=0.05)
        except queue.Empty:
            continue


def hang_polls_for_a_file():
    while not os.path.exists("/nowhere/at/all"):
        time.sleep(0.01)


def hang_polls_a_child():
    child = start_child(threading.Event().wait)
    while child.is_alive():
        time.sleep(0.01)


def hang_asyncio_event():
    async def main():
        await asyncio.Event().wait()

    asyncio.run(main())


def hang_asyncio_polls():
    async def main():
        while not done:
            await asyncio.sleep(0.01)

    asyncio.run(main())


def hang_reads_its_own_pipe():
    reader, writer = os.pipe()
    os.read(reader, 1)
    os.close(writer)


def hang_reads_its_own_socket():
    a, b = socket.socketpair()
    a.recv(1)
    b.close()


def hang_selects_its_own_pipe():
    reader, writer = os.pipe()
    while not select.select([reader], [], [], 0.05)[0]:
        pass
    os.close(writer)


def hang_writes_a_pipe_nobody_reads():
    reader, writer = os.pipe()
    os.write(writer, b"x" * (1 << 20))
    os.close(reader)


def hang_pause():
    signal.pause()


def hang_sigwait():
    signal.sigwait({signal.SIGUSR1})


def hang_input_from_a_pipe():
    os.dup2(outside, 0)
    sys.stdin = os.fdopen(0)
    input()


def hang_input_from_a_terminal():
    _, terminal = os.openpty()
    os.dup2(terminal, 0)
    sys.stdin = os.fdopen(0)
    input()


def hang_child_that_waits():
    start_child(threading.Event().wait).join()


def hang_child_with_a_held_lock():
    shared = fork.Lock()
    shared.acquire()
    start_child(shared.acquire)
    shared.acquire()


def hang_stopped_child():
    child = subprocess.Popen(["sleep", str(FOREVER)])
    child.send_signal(signal.SIGSTOP)
    child.wait()


def hang_stopped_grandchild():
    subprocess.run(["sh", "-c", f"sleep {FOREVER} & kill -STOP $!; wait"])


def hang_child_and_parent_both_write():
    # `cat` waits until somebody reads what it has copied, and we until it reads more.
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdin.write(b"x" * (1 << 20))


def hang_output_of_a_stopped_child():
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.send_signal(signal.SIGSTOP)
    child.communicate(b"text")


def hang_child_queue():
    requests, batches = fork.Queue(), fork.Queue()
    start_child(requests.get)
    batches.get()


def hang_child_pipe():
    ours, theirs = fork.Pipe()
    start_child(theirs.recv)
    ours.recv()


def hang_loader_of_processes_that_polls():
    """Both sides wait with a timeout, as the workers of torch's DataLoader and it do."""
    requests, batches = fork.Queue(), fork.Queue()

    def poll(source):
        while True:
            try:
                return source.get(timeout=0.05)
            except queue.Empty:
                pass

    start_child(poll, requests)
    poll(batches)


def hang_pool_of_threads():
    with ThreadPoolExecutor(2) as pool:
        pool.submit(flag.wait).result()


def hang_pool_of_processes():
    with fork.Pool(2) as pool:
        pool.apply(signal.pause)


def hang_executor_of_processes():
    with ProcessPoolExecutor(1, mp_context=fork) as pool:
        pool.submit(signal.pause).result()


def hang_beside_service_threads():
    """A progress bar, a server for metrics, and an idle pool."""

    def refresh():
        while True:
            flag.wait(0.1)
            now = time.time()
            assert now

    start(refresh)
    start(server.accept)
    ThreadPoolExecutor(2).submit(is_done).result()
    queue.Queue().get()


def hang_in_a_generator_of_data():
    path = str(_SOURCE / "datasets" / "_sources.py")
    compiled_as(path, "def read():\n    yield batches.get()\nnext(read())", batches=queue.Queue())


def hang_with_locals_handed_out():
    mine = locals()
    mine["queue"] = queue.Queue()
    mine["queue"].get()


# Slow work


def slow_sleep():
    time.sleep(FOREVER)


def slow_many_sleeps():
    for _ in range(FOREVER):
        time.sleep(0.05)


def slow_sleep_in_helpers():
    def pause(seconds):
        time.sleep(seconds)

    def read():
        for row in range(FOREVER):
            pause(0.04)
            yield row

    for _ in read():
        pass


def slow_sleep_with_signals():
    signal.signal(signal.SIGUSR1, lambda *_: None)
    start(lambda: [signal_and_sleep() for _ in range(FOREVER)])
    time.sleep(FOREVER)


def signal_and_sleep():
    os.kill(os.getpid(), signal.SIGUSR1)
    flag.wait(0.05)


def slow_wait_with_a_timeout():
    flag.wait(FOREVER)


def slow_queue_with_a_timeout():
    queue.Queue().get(timeout=FOREVER)


def slow_tokenizing():
    text = " ".join(f"word{i}" for i in range(5000))
    counts = {}
    while True:
        for word in text.split():
            pieces = [word[i : i + 2] for i in range(0, len(word), 2)]
            for piece in pieces:
                counts[piece] = counts.get(piece, 0) + 1


def slow_object_that_counts():
    class Reader:
        position = 0

        def step(self):
            self.position += 1
            return True

    reader = Reader()
    while reader.step():
        pass


def slow_module_that_counts():
    compiled_as("train.py", "n = 0\nwhile True:\n    n += 1")


def slow_global_counter():
    compiled_as("train.py", "n = 0\ndef f():\n    global n\n    while True:\n        n += 1\nf()")


def slow_recursion():
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    fib(60)


def slow_call_of_c():
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)


def slow_calls_of_c():
    data = os.urandom(1 << 23)
    while True:
        zlib.compress(data, 9)


def slow_reading_of_a_file():
    with tempfile.TemporaryFile() as file:
        file.write(b"line\n" * (1 << 20))
        while True:
            file.seek(0)
            while file.readline():
                pass


def slow_saving_of_a_file():
    data = os.urandom(1 << 24)
    with tempfile.TemporaryFile() as file:
        while True:
            file.seek(0)
            file.write(data)
            os.fsync(file.fileno())


def slow_pipe_from_outside():
    os.read(outside, 1)


def slow_lines_of_a_pipe():
    for _ in os.fdopen(outside):
        pass


def slow_socket():
    socket.create_connection(server.getsockname()).recv(1)


def slow_socket_with_retries():
    connection = socket.create_connection(server.getsockname())
    connection.settimeout(0.03)
    while True:
        try:
            connection.recv(1)
        except TimeoutError:
            continue


def slow_library_with_a_socket():
    """It waits for a thread of its own, which tells nobody what it waits for."""
    libc, start_time = ctypes.CDLL(None), time.monotonic()
    event = libc.eventfd(0, 0)
    assert start_time
    libc.read(event, ctypes.create_string_buffer(8), 8)


def slow_library_that_polls():
    library = ctypes.CDLL(None)
    while not library.usleep(20_000):
        pass


def slow_server():
    socket.create_server(("127.0.0.1", 0)).accept()


def slow_asyncio_sleep():
    asyncio.run(asyncio.sleep(FOREVER))


def slow_asyncio_with_many_sleeps():
    async def read():
        for row in range(FOREVER):
            await asyncio.sleep(0.04)
            yield row

    async def main():
        async for _ in read():
            pass

    asyncio.run(main())


def slow_asyncio_socket():
    async def main():
        reader, _ = await asyncio.open_connection(*server.getsockname())
        await reader.read(1)

    asyncio.run(main())


def slow_thread_that_sleeps():
    batches = queue.Queue()
    start(lambda: batches.put(time.sleep(FOREVER)))
    batches.get()


def slow_thread_that_computes():
    def produce():
        while True:
            batches.put(sum(range(300_000)))

    batches = queue.Queue(maxsize=1)
    start(produce)
    for number in itertools.count():
        batches.get()
        batches.task_done()
        assert number >= 0


def slow_thread_in_c():
    start(slow_call_of_c).join()


def slow_thread_with_a_socket():
    batches = queue.Queue()
    start(lambda: batches.put(slow_socket()))
    batches.get()


def slow_thread_one_waits_for_by_polling():
    thread = start(slow_many_sleeps)
    while thread.is_alive():
        time.sleep(0.01)


def slow_pool_of_threads():
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(time.sleep, [FOREVER] * 4))


def slow_child_that_sleeps():
    batches = fork.Queue()
    start_child(lambda: batches.put(time.sleep(FOREVER)))
    batches.get()


def slow_child_of_many_sleeps():
    start_child(slow_many_sleeps).join()


def slow_child_that_computes():
    batches = fork.Queue()
    start_child(lambda: batches.put(slow_tokenizing()))
    while True:
        with contextlib.suppress(queue.Empty):
            batches.get(timeout=0.05)


def slow_child_with_a_socket():
    start_child(slow_socket).join()


def slow_program():
    subprocess.run(["sleep", str(FOREVER)])


def slow_program_with_output():
    subprocess.run(["sh", "-c", f"sleep {FOREVER}; echo end"], capture_output=True)


def slow_pipeline():
    subprocess.run(["sh", "-c", f"(sleep {FOREVER}; echo end) | cat"], capture_output=True)


def slow_executor_of_processes():
    with ProcessPoolExecutor(2, mp_context=fork) as pool:
        list(pool.map(time.sleep, [FOREVER] * 4))


def slow_pool_of_processes():
    with fork.Pool(2) as pool:
        list(pool.imap(time.sleep, [FOREVER] * 4))


def slow_pause_until_the_alarm():
    signal.alarm(FOREVER)
    signal.pause()


def slow_file_from_another_machine():
    """Where data are read, files may still be on their way."""
    path = str(_SOURCE / "datasets" / "_sources.py")
    text = "def read():\n    while not exists('/nowhere'):\n        sleep(0.01)\nread()"
    compiled_as(path, text, exists=os.path.exists, sleep=time.sleep)


def slow_iterator_of_c():
    """It is somewhere inside of `zip`, and no variable of the program tells where."""
    path = str(_SOURCE / "datasets" / "_sources.py")
    rows = zip(itertools.count(), itertools.count(), strict=True)
    compiled_as(path, "def read():\n    while rows.__next__(): pass\nread()", rows=rows)


def slow_compilation():
    path = "/lib/python3.11/site-packages/jax/_src/compiler.py"
    compiled_as(path, "def compile(): event.wait()\ncompile()", event=threading.Event())


# The cases are run


def look(case, kind, result):
    """In a thread beside the script: beats, and says what they have told."""
    try:
        activity = Activity()
        begin = time.monotonic()
        most = number = still = 0
        while (kind == "slow" and number < SLOW_BEATS) or (kind == "hang" and still < STILL_BEATS):
            time.sleep(BEAT_SECONDS)
            still = activity.beat()
            most, number = max(most, still), number + 1
            if time.monotonic() - begin > DEADLINE_SECONDS:
                break
        message = {"case": case, "most": most, "beats": number, "where": activity.where()}
    except BaseException as error:
        message = {"case": case, "error": repr(error)}
    os.write(result, json.dumps(message).encode())
    os._exit(0)


def begin(case, kind):
    """Runs a case in a process of its own, and returns that and where its result comes from."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        end_with_parent()
        os.register_at_fork(after_in_child=end_with_parent)
        os.close(feeder)
        os.close(reader)
        start(look, case, kind, writer)
        error = "it has ended"
        try:
            globals()[case]()
        except BaseException as raised:
            error = repr(raised)
        os.write(writer, json.dumps({"case": case, "error": error}).encode())
        os._exit(1)
    os.close(writer)
    return pid, reader


def end_with_parent():
    """Leaves nobody behind, even if whoever runs the cases is killed."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def end(pid, reader):
    # One write, no end of file: children of the case have the pipe, too.
    print(os.read(reader, 1 << 16).decode(), flush=True)
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main(kind, *cases):
    cases = cases or [name for name in globals() if name.startswith(f"{kind}_")]
    for number in range(0, len(cases), NUM_AT_ONCE):
        for pid, reader in [begin(case, kind) for case in cases[number : number + NUM_AT_ONCE]]:
            end(pid, reader)


if __name__ == "__main__":
    main(*sys.argv[1:])
