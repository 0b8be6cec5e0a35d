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

// 0, or a status of getaddrinfo.
int Resolve(const Endpoint& endpoint, AddressList& list) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  return getaddrinfo(endpoint.host.c_str(),
                     std::to_string(endpoint.port).c_str(), &hints,
                     &list.first);
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

// 0, where `fd` listens at the address, or why not.
int ListenAt(const sockaddr* address, socklen_t length, FileDescriptor& fd) {
  fd = FileDescriptor(
      socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, /*protocol=*/0));
  // A port left by an earlier job may still be in TIME_WAIT.
  const int on = 1;
  const int off = 0;
  if (fd.is_open() && address->sa_family == AF_INET6) {
    // All addresses of IPv6 are those of IPv4 too.
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (fd.is_open() &&
      setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
      bind(fd.get(), address, length) == 0 &&
      listen(fd.get(), SOMAXCONN) == 0) {
    return 0;
  }
  return errno;
}

int ListenEverywhere(int port, FileDescriptor& fd) {
  sockaddr_in6 v6 = {};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(static_cast<uint16_t>(port));
  if (ListenAt(reinterpret_cast<sockaddr*>(&v6), sizeof(v6), fd) == 0) return 0;
  // A host without IPv6.
  sockaddr_in v4 = {};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(static_cast<uint16_t>(port));
  return ListenAt(reinterpret_cast<sockaddr*>(&v4), sizeof(v4), fd);
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

bool IsLoopbackName(std::string_view host) {
  return host == "localhost" || host.starts_with("localhost.") ||
         host.ends_with(".localhost") || host == "ip6-localhost" ||
         host.starts_with("127.") || host == "::1";
}

Result<Attempt> Listen(const Endpoint& at, bool everywhere) {
  FileDescriptor fd;
  int error = EADDRNOTAVAIL;
  if (!everywhere) {
    AddressList list;
    const int status = Resolve(at, list);
    if (status != 0) return UnknownHost(at, status);
    for (const addrinfo* a = list.first; a != nullptr && error != 0;
         a = a->ai_next) {
      error = ListenAt(a->ai_addr, a->ai_addrlen, fd);
    }
  }
  // Also of a family that this host lacks.
  if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) {
    error = ListenEverywhere(at.port, fd);
  }
  if (error == 0) return Attempt{std::move(fd), ""};
  return Unavailable(
      Text("rank 0 cannot serve the job's store at ", at.host, ":", at.port,
           ": ", std::strerror(error),
           error == EADDRINUSE ? "; choose another MASTER_PORT" : ""));
}

Endpoint OwnEndpoint(int listener, const Endpoint& at) {
  sockaddr_storage own = {};
  socklen_t length = sizeof(own);
  getsockname(listener, reinterpret_cast<sockaddr*>(&own), &length);
  const auto* const v4 = reinterpret_cast<const sockaddr_in*>(&own);
  const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(&own);
  const bool everywhere =
      own.ss_family == AF_INET6
          ? IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr)
          : own.ss_family == AF_INET && v4->sin_addr.s_addr == INADDR_ANY;
  return everywhere ? Endpoint{"127.0.0.1", at.port} : at;
}

Result<Attempt> Connect(const Endpoint& to, Clock::time_point deadline,
                        const std::atomic<bool>* stop) {
  AddressList list;
  const int status = Resolve(to, list);
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
