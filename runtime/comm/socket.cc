#include "runtime/comm/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "runtime/comm/text.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// Of one attempt; a host that is not there answers none.
constexpr auto kConnectTime = std::chrono::seconds(5);

struct AddressList {
  addrinfo* first = nullptr;
  ~AddressList() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

// 0, or a status of getaddrinfo. `host`: null for all addresses of this host.
int Resolve(const char* host, int port, AddressList& list) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | AI_PASSIVE;  // passive: if host is null
  return getaddrinfo(host, std::to_string(port).c_str(), &hints, &list.first);
}

// Of a host without an address, by the status. In some clusters a name has one
// only some time after its host has come.
Result<Attempt> UnknownHost(const Endpoint& endpoint, int status) {
  std::string trouble =
      Text("cannot find the host '", endpoint.host, "' of rank 0: ",
           status == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(status));
  const bool may_resolve_later =
      status == EAI_AGAIN || status == EAI_NONAME || status == EAI_NODATA;
  if (!may_resolve_later) return Unavailable(std::move(trouble));
  return Attempt{FileDescriptor(), std::move(trouble), /*unresolved=*/true};
}

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(
        &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  }
  const auto* const v4 = reinterpret_cast<const sockaddr_in*>(address);
  return address->sa_family == AF_INET &&
         ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

// Whether `host` is a loopback address here but another one elsewhere: in
// Debian's /etc/hosts the host's own name is 127.0.1.1.
bool IsLoopbackOnlyHere(std::string_view host, const AddressList& list) {
  const bool everywhere =
      host == "localhost" || host.starts_with("localhost.") ||
      host.ends_with(".localhost") || host == "ip6-localhost" ||
      host.starts_with("127.") || host == "::1";
  if (everywhere) return false;
  for (const addrinfo* a = list.first; a != nullptr; a = a->ai_next) {
    if (IsLoopback(a->ai_addr)) return true;
  }
  return false;
}

// Whether a connection is one to itself, as TCP makes it where nobody listens
// on a port of this host that the system then picks for who connects: rank 0
// could not listen there any more.
bool IsItsOwnPeer(int fd) {
  sockaddr_storage own = {};
  sockaddr_storage peer = {};
  socklen_t own_length = sizeof(own);
  socklen_t peer_length = sizeof(peer);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) ==
             0 &&
         own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0;
}

}  // namespace

Event Await(int fd, short events, Clock::time_point deadline,
            const std::atomic<bool>* stop) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::clamp<Clock::duration>(deadline - Clock::now(), Clock::duration(),
                                    kStopInterval));
    pollfd polled = {fd, events, 0};
    if (poll(&polled, 1, static_cast<int>(left.count())) > 0) {
      return Event::kReady;
    }
    if (Clock::now() >= deadline) return Event::kLate;
    if (stop != nullptr && stop->load()) return Event::kStopped;
  }
}

void SetNoDelay(int fd) {
  const int on = 1;  // fails harmlessly on what is no TCP socket
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Result<Attempt> Listen(const Endpoint& at) {
  AddressList named, all;
  int status = Resolve(at.host.c_str(), at.port, named);
  const bool everywhere = status == 0 && IsLoopbackOnlyHere(at.host, named);
  if (everywhere) status = Resolve(nullptr, at.port, all);
  if (status != 0) return UnknownHost(at, status);
  int error = 0;
  for (const addrinfo* a = everywhere ? all.first : named.first; a != nullptr;
       a = a->ai_next) {
    FileDescriptor fd(
        socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    // A port left by an earlier job may still be in TIME_WAIT.
    const int on = 1;
    if (fd.is_open() &&
        setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 &&
        listen(fd.get(), SOMAXCONN) == 0) {
      return Attempt{std::move(fd), ""};
    }
    error = errno;
  }
  return Unavailable(
      Text("rank 0 cannot serve the job's store at ", at.host, ":", at.port,
           ": ", std::strerror(error),
           error == EADDRINUSE ? "; choose another MASTER_PORT" : ""));
}

Result<Attempt> Connect(const Endpoint& to, Clock::time_point deadline,
                        const std::atomic<bool>* stop) {
  AddressList list;
  const int status = Resolve(to.host.c_str(), to.port, list);
  if (status != 0) return UnknownHost(to, status);
  int error = 0;
  for (const addrinfo* a = list.first; a != nullptr; a = a->ai_next) {
    FileDescriptor fd(socket(a->ai_family,
                             a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
                             a->ai_protocol));
    if (!fd.is_open()) {
      error = errno;
      if (error == EMFILE) {
        return Unavailable(
            Text("no file descriptor is left for rank 0's store "
                 "at ",
                 to.host, ":", to.port, ": ", std::strerror(error),
                 "; raise ulimit -n"));
      }
      continue;
    }
    error = connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      const auto patience = std::min(deadline, Clock::now() + kConnectTime);
      if (Await(fd.get(), POLLOUT, patience, stop) != Event::kReady) {
        error = ETIMEDOUT;
      } else {
        socklen_t length = sizeof(error);
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      }
    }
    if (error == 0 && IsItsOwnPeer(fd.get())) {
      // At once, without TIME_WAIT, in which rank 0 could not listen there.
      const linger reset = {1, 0};
      setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
      error = ECONNREFUSED;
    }
    if (error != 0) continue;
    SetNoDelay(fd.get());
    return Attempt{std::move(fd), ""};
  }
  return Attempt{FileDescriptor(), std::strerror(error)};
}

}  // namespace tessera
