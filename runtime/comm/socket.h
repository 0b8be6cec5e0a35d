#pragma once
// The sockets of the store: where rank 0 listens, how the others connect, and
// waits for them.

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>

#include "planner/base/file_descriptor.h"
#include "planner/base/result.h"

namespace tessera {

// How often waits look whether they are to stop.
inline constexpr auto kStopInterval = std::chrono::milliseconds(100);

enum class Event { kReady, kLate, kStopped };

// Waits until poll has one of `events` of `fd`; of -1 it has none. A deadline
// that is over makes it a look. `stop` may be null.
Event Await(int fd, short events,
            std::chrono::steady_clock::time_point deadline,
            const std::atomic<bool>* stop);

// So that what is sent leaves at once.
void SetNoDelay(int fd);

// A name or an address, and a port.
struct Endpoint {
  std::string host;
  int port = 0;
};

// One attempt to listen or to connect. What no later one would change is an
// error, kUnavailable.
struct Attempt {
  FileDescriptor fd;        // none: it is in vain
  std::string trouble;      // then
  bool unresolved = false;  // the host has no address yet
};

// Whether a host means this one wherever it is said: localhost, 127.0.0.1.
bool IsLoopbackName(std::string_view host);

// A socket that listens there; `everywhere`, or where the host has none of this
// one's addresses, on all addresses of this one. Errors: the host is unknown
// for good, or the port is in use.
Result<Attempt> Listen(const Endpoint& at, bool everywhere);

// Where this host reaches a socket that listens as `at` says.
Endpoint OwnEndpoint(int listener, const Endpoint& at);

// A socket that does not block. Errors: the host is unknown for good, or this
// process has no file descriptor left.
Result<Attempt> Connect(const Endpoint& to,
                        std::chrono::steady_clock::time_point deadline,
                        const std::atomic<bool>* stop);

}  // namespace tessera
