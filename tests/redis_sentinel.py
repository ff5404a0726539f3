"""A master, a replica and Sentinels of real servers for tests, as operators set them up."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import redis

from tests.redis_server import RedisServer, default_binary, free_port
from tests.waiting import wait_for

NAME = "the-master"
REPLICATION = "replication"  # the user that replicas are


class SentinelSetup:
    """Up when it is constructed. `url` names the Sentinels; failovers begin half a second after the master's death."""

    def __init__(self, sentinels: int = 1) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="headrace-test-sentinel-")
        self.servers = [RedisServer(None, "--repl-diskless-sync-delay", "0") for _ in range(2)]
        for server in self.servers:
            with redis.Redis.from_url(server.url) as client:
                client.acl_setuser(REPLICATION, enabled=True, passwords=["+p"], commands=["+psync", "+replconf", "+ping"])
                client.config_set("masteruser", REPLICATION)
                client.config_set("masterauth", "p")
        master, replica = self.servers
        with redis.Redis.from_url(replica.url) as client:
            client.replicaof("127.0.0.1", str(master.port))
            # Sentinels look at a replica every ten seconds: it is in step when they look first
            wait_for(lambda: client.info("replication")["master_link_status"] == "up", "a replica in step")
        self.ports = [free_port() for _ in range(sentinels)]
        self._sentinels = [self._start_sentinel(port) for port in self.ports]
        self.url = f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{NAME}/0"
        wait_for(self._is_complete, "every Sentinel knows replica and peers, and the replica is in step")

    def _start_sentinel(self, port: int) -> subprocess.Popen[bytes]:
        config = Path(self.folder.name) / f"{port}.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {self.folder.name}\nlogfile {config.with_suffix('.log')}\n"
            f"sentinel monitor {NAME} 127.0.0.1 {self.master.port} {len(self.ports) // 2 + 1}\n"
            f"sentinel down-after-milliseconds {NAME} 500\nsentinel failover-timeout {NAME} 1000\n"
        )
        return subprocess.Popen([default_binary(), str(config), "--sentinel"], stdout=subprocess.DEVNULL)

    @property
    def master(self) -> RedisServer:
        return self.servers[0]

    @property
    def replica(self) -> RedisServer:
        return self.servers[1]

    def _is_complete(self) -> bool:
        try:
            return all(self._knows_all(port) for port in self.ports)
        except redis.exceptions.ConnectionError:
            return False

    def _knows_all(self, port: int) -> bool:
        with redis.Redis(port=port) as sentinel:
            state = sentinel.sentinel_master(NAME)
            replicas = sentinel.sentinel_slaves(NAME)
        in_step = [each for each in replicas if each["master-link-status"] == "ok"]
        return state["num-other-sentinels"] == len(self.ports) - 1 and len(in_step) == 1

    def cut_replication(self) -> None:
        """From now on the replica gets nothing: it lacks what follows, as it does where a master dies before it has sent all."""
        with redis.Redis.from_url(self.master.url) as client:
            client.acl_deluser(REPLICATION)

    def kill_master(self) -> None:
        """The replica takes its place: `servers` are exchanged when the Sentinels say so."""
        lost = self.master
        lost.kill()
        self.servers.reverse()
        wait_for(lambda: all(self._address(port) == self.master.port for port in self.ports), "a failover")

    def fail_over(self) -> None:
        """As `kill_master`, but ordered. The old master lives on as a replica and cuts no connection."""
        with redis.Redis(port=self.ports[-1]) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", NAME)
        self.servers.reverse()
        wait_for(lambda: self._address(self.ports[-1]) == self.master.port, "a failover")
        with redis.Redis.from_url(self.replica.url) as old:  # a Sentinel would do it up to ten seconds later
            old.replicaof("127.0.0.1", str(self.master.port))
            wait_for(lambda: old.info("replication")["master_link_status"] == "up", "a replica in step")

    def kill_sentinel(self, index: int) -> None:
        process = self._sentinels.pop(index)
        process.kill()
        process.wait()
        del self.ports[index]

    def _address(self, port: int) -> int:
        with redis.Redis(port=port) as sentinel:
            return int(sentinel.sentinel_get_master_addr_by_name(NAME)[1])

    def stop(self) -> None:
        for process in self._sentinels:
            process.kill()
            process.wait()
        for server in self.servers:
            server.kill()  # a master that is asked to stop waits for its replica
            server.stop()
        self.folder.cleanup()
