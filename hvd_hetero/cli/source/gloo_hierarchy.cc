// Part of hvd_hetero; `hvd-hetero build-horovod` adds this file to Horovod's source. Apache-2.0.

#include "gloo_hierarchy.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

#include <unistd.h>
#ifdef __linux__
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#endif

#include "gloo/allgather.h"
#include "gloo/common/error.h"
#include "gloo/transport/unbound_buffer.h"

#include "../logging.h"

namespace horovod {
namespace common {

namespace {

constexpr size_t kChunkBytes = 1 << 20;       // of a rank's data in the shared memory at a time; there are two
constexpr size_t kLeastChunkBytes = 1 << 18;  // below, a second chunk costs more messages than it hides
constexpr size_t kMostElementBytes = 16;
constexpr size_t kAlign = 16;                 // elements: segments start on cache lines
constexpr int kMostLocal = 64;
constexpr int kMostNodes = 16;  // the exchange between nodes is direct: messages grow with their square
constexpr long kLookNs = 100 * 1000 * 1000;  // how often a rank that waits looks whether its peer lives

// A chunk from another node arrives in one of so many places. A rank sends chunk c when it has received chunk c - 2,
// which was sent by a rank that had used up its chunk c - 4.
constexpr uint32_t kPlaces = 4;

constexpr uint64_t kNameSlot = 0x7100000000000000ull; // apart from Gloo's own collectives, 0x01 to 0x08

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

struct Range {
  size_t begin;
  size_t count;
};

// Part `index` of `parts` nearly equal ones, in elements.
Range PartOf(size_t count, int parts, int index) {
  const size_t each = RoundUp((count + parts - 1) / parts, kAlign);
  const size_t begin = std::min(count, each * index);
  return {begin, std::min(count, begin + each) - begin};
}

std::string Variable(const char* name) {
  const char* given = std::getenv(name);
  return given != nullptr ? given : "";
}

uint64_t HashOfHost() {
  // HOROVOD_GLOO_NODE is for those whose host names do not say who shares memory.
  std::string name = Variable("HOROVOD_GLOO_NODE");
  if (name.empty()) {
    name = Variable("HOROVOD_HOSTNAME");
  }
  if (name.empty()) {
    char buffer[256] = {0};
    gethostname(buffer, 255);
    name = buffer;
  }
  uint64_t hash = 14695981039346656037ull;  // FNV-1a: the same in every process
  for (unsigned char letter : name) {
    hash = (hash ^ letter) * 1099511628211ull;
  }
  return hash;
}

template <typename T>
std::vector<T> Gathered(const std::shared_ptr<gloo::Context>& context, T value) {
  std::vector<T> all(context->size);
  gloo::AllgatherOptions options(context);
  options.setInput(&value, 1);
  options.setOutput(all.data(), all.size());
  gloo::allgather(options);
  return all;
}

// Whether a process of this host is gone, or a zombie.
bool IsGone(int pid) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) {
    return errno == ENOENT;
  }
  char text[512] = {0};
  const size_t length = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  const char* after_name = length > 0 ? std::strrchr(text, ')') : nullptr;
  return after_name == nullptr || after_name[1] == '\0' || after_name[2] == 'Z' || after_name[2] == 'X';
}

} // namespace

struct GlooHierarchy::Header {
  struct Words {
    alignas(64) std::atomic<uint32_t> in;   // chunks that this rank has put where others read them
    alignas(64) std::atomic<uint32_t> out;  // chunks of whose segment this rank has finished the sum
  };
  uint64_t nonce;
  std::atomic<uint32_t> aborted;
  std::atomic<int32_t> pids[kMostLocal];
  Words words[kMostLocal];

  static size_t Bytes() { return RoundUp(sizeof(Header), 4096); }
};

bool GlooHierarchy::Enabled() {
  static const bool enabled = Variable("HOROVOD_GLOO_ALLREDUCE") == "hierarchical";
  return enabled;
}

void GlooHierarchy::CheckVariable() {
  static const std::string word = Variable("HOROVOD_GLOO_ALLREDUCE");
  if (!word.empty() && word != "ring" && word != "hierarchical") {
    throw std::invalid_argument("HOROVOD_GLOO_ALLREDUCE must be ring or hierarchical. Received: " + word);
  }
}

GlooHierarchy::GlooHierarchy(std::shared_ptr<gloo::Context> context) : context_(std::move(context)) {
  usable_ = FindNodes() && ShareMemory();
  if (usable_) {
    ConnectNodes();
  } else {
    LOG(DEBUG) << "All-reduce in one level: the ranks of a node could not share memory, or there are too many nodes.";
    Unmap();
  }
}

GlooHierarchy::~GlooHierarchy() {
  Abort();
  peers_.clear();  // nothing may arrive in memory that is gone
  Unmap();
}

bool GlooHierarchy::FindNodes() {
  const auto hosts = Gathered(context_, HashOfHost());
  std::vector<uint64_t> seen;
  for (int rank = 0; rank < context_->size; ++rank) {
    const auto found = std::find(seen.begin(), seen.end(), hosts[rank]);
    const auto node = found - seen.begin();
    if (found == seen.end()) {
      seen.push_back(hosts[rank]);
      nodes_.emplace_back();
    }
    if (rank == context_->rank) {
      node_ = node;
      local_ = nodes_[node].size();
    }
    nodes_[node].push_back(rank);
  }
  size_t least = nodes_[0].size(), most = least;
  for (const auto& ranks : nodes_) {
    least = std::min(least, ranks.size());
    most = std::max(most, ranks.size());
  }
  rails_ = least;
  return most <= kMostLocal && nodes_.size() <= kMostNodes;
}

uint8_t* GlooHierarchy::In(uint32_t chunk, int local) const {
  return memory_ + Header::Bytes() + ((chunk & 1) * nodes_[node_].size() + local) * kChunkBytes;
}

uint8_t* GlooHierarchy::Incoming(int node, uint32_t place) {
  return incoming_.data() + (node * kPlaces + place) * place_bytes_;
}

uint8_t* GlooHierarchy::Results() {
  return nodes_[node_].size() == 1 ? alone_.data() : memory_ + Header::Bytes() + 2 * nodes_[node_].size() * kChunkBytes;
}

#ifdef __linux__

// The leader's memory has no name that could be left behind: its node's other ranks open it through the leader's file
// descriptor, which works for ranks that see one another's processes, and the nonce says that it is the right one.
bool GlooHierarchy::ShareMemory() {
  const auto& ranks = nodes_[node_];
  struct {
    uint64_t nonce;
    int32_t pid;
    int32_t descriptor;
  } name = {0, 0, -1};
  int descriptor = -1;
  uint8_t good = 1;
  if (ranks.size() > 1) {
    memory_bytes_ = Header::Bytes() + 2 * (ranks.size() + 1) * kChunkBytes;
    auto buffer = context_->createUnboundBuffer(&name, sizeof(name));
    if (local_ == 0) {
      std::random_device random;
      name = {(uint64_t(random()) << 32) | random(), getpid(), -1};
      descriptor = syscall(SYS_memfd_create, "hvd_hetero", 1u /* MFD_CLOEXEC */);
      // Reserves the pages: running out of memory later would be a SIGBUS.
      if (descriptor >= 0 && posix_fallocate(descriptor, 0, memory_bytes_) == 0) {
        name.descriptor = descriptor;
      }
    } else {
      buffer->recv(ranks[0], kNameSlot);
      buffer->waitRecv(context_->getTimeout());
      if (name.descriptor >= 0) {
        char path[64];
        std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", name.pid, name.descriptor);
        descriptor = open(path, O_RDWR | O_CLOEXEC);
      }
    }
    if (descriptor >= 0 && name.descriptor >= 0) {
      void* at = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
      memory_ = at != MAP_FAILED ? static_cast<uint8_t*>(at) : nullptr;
    }
    auto* header = reinterpret_cast<Header*>(memory_);
    if (local_ == 0) {
      if (header != nullptr) {
        header->nonce = name.nonce;
      } else {
        name.descriptor = -1;
      }
      for (size_t peer = 1; peer < ranks.size(); ++peer) {
        buffer->send(ranks[peer], kNameSlot);
      }
      for (size_t peer = 1; peer < ranks.size(); ++peer) {
        buffer->waitSend(context_->getTimeout());
      }
    }
    good = header != nullptr && header->nonce == name.nonce;
    if (good) {
      header->pids[local_].store(getpid());
    }
  } else {
    alone_.resize(2 * kChunkBytes);
  }
  const auto all = Gathered(context_, good);
  if (descriptor >= 0) {
    close(descriptor);
  }
  return std::find(all.begin(), all.end(), 0) == all.end();
}

void GlooHierarchy::Unmap() {
  if (memory_ != nullptr) {
    munmap(memory_, memory_bytes_);
    memory_ = nullptr;
  }
}

void GlooHierarchy::Announce(std::atomic<uint32_t>& word, uint32_t chunk) {
  word.store(chunk, std::memory_order_release);
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void GlooHierarchy::Await(const std::atomic<uint32_t>& word, uint32_t chunk, int local) {
  auto* header = reinterpret_cast<Header*>(memory_);
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - chunk) >= 0) {
      return;
    }
    const int rank = nodes_[node_][local];
    if (header->aborted.load() != 0) {
      throw ::gloo::IoException("All-reduce: a rank of this node has given up (waiting for rank " +
                                std::to_string(rank) + ")");
    }
    struct timespec look = {0, kLookNs};
    const auto said = syscall(SYS_futex, &word, FUTEX_WAIT, seen, &look, nullptr, 0);
    if (said == -1 && errno == ETIMEDOUT) {
      if (word.load(std::memory_order_acquire) == seen && IsGone(header->pids[local].load())) {
        throw ::gloo::IoException("All-reduce: the process of rank " + std::to_string(rank) + " is gone");
      }
      if (std::chrono::steady_clock::now() - start > context_->getTimeout()) {
        throw ::gloo::IoException("All-reduce: timed out waiting for rank " + std::to_string(rank));
      }
    }
  }
}

// Wakes the ranks of this node that wait for this one, for ever: it will not come.
void GlooHierarchy::Abort() noexcept {
  if (memory_ == nullptr) {
    return;
  }
  auto* header = reinterpret_cast<Header*>(memory_);
  header->aborted.store(1);
  for (auto* word : {&header->words[local_].in, &header->words[local_].out}) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

#else

bool GlooHierarchy::ShareMemory() {
  alone_.resize(2 * kChunkBytes);
  const uint8_t good = nodes_[node_].size() == 1;
  const auto all = Gathered(context_, good);
  return std::find(all.begin(), all.end(), 0) == all.end();
}

void GlooHierarchy::Unmap() {}
void GlooHierarchy::Announce(std::atomic<uint32_t>&, uint32_t) {}
void GlooHierarchy::Await(const std::atomic<uint32_t>&, uint32_t, int) {}
void GlooHierarchy::Abort() noexcept {}

#endif

// Buffers on both sides of each pair of owners, made once: what is sent goes straight into its place. (Gloo's unbound
// buffers, made for each operation, take three messages for one: either side first tells the other.)
void GlooHierarchy::ConnectNodes() {
  const int slot = context_->nextSlot(2);
  const int nodes = nodes_.size();
  if (local_ < rails_ && nodes > 1) {
    // The largest segment, or part of one.
    const size_t parts = rails_ * (nodes > 2 ? nodes : 1);
    place_bytes_ = RoundUp((kChunkBytes + parts - 1) / parts + 4 * kAlign * kMostElementBytes, 64);
    incoming_.resize(nodes * kPlaces * place_bytes_);
    peers_.resize(nodes);
    for (int node = 0; node < nodes; ++node) {
      if (node == node_) {
        continue;
      }
      auto& pair = context_->getPair(nodes_[node][local_]);
      auto& peer = peers_[node];
      peer.sum_out = pair->createSendBuffer(slot, Results(), 2 * kChunkBytes);
      peer.sum_in = pair->createRecvBuffer(slot, Incoming(node, 0), kPlaces * place_bytes_);
      if (nodes > 2) {  // two nodes exchange sums, and each makes the total
        peer.total_out = pair->createSendBuffer(slot + 1, Results(), 2 * kChunkBytes);
        peer.total_in = pair->createRecvBuffer(slot + 1, Results(), 2 * kChunkBytes);
      }
    }
  }
  Gathered(context_, uint8_t{1});  // nobody sends before everybody can receive
}

// One all-reduce: the data goes through in chunks. While one chunk is between the nodes, the next is summed within them.
struct GlooHierarchy::Run {
  GlooHierarchy& self;
  uint8_t* data;
  size_t elements;
  size_t size;  // of an element
  Reduce reduce;

  const int locals = self.nodes_[self.node_].size();
  const int nodes = self.nodes_.size();
  const size_t chunk_elements = ChunkElements();
  const size_t chunks = (elements + chunk_elements - 1) / chunk_elements;
  uint8_t* const results = self.Results();

  size_t ChunkElements() const {
    const size_t half = RoundUp((elements * size + 1) / 2, 4096);
    return std::min(kChunkBytes, std::max(kLeastChunkBytes, half)) / size;
  }

  Header& header() { return *reinterpret_cast<Header*>(self.memory_); }
  uint32_t Number(size_t chunk) const { return self.chunk_ + chunk + 1; }  // over all operations
  Range Chunk(size_t chunk) const {
    return {chunk * chunk_elements, std::min(elements, (chunk + 1) * chunk_elements) - chunk * chunk_elements};
  }
  Range Segment(size_t chunk, int rail) const {
    return rail < self.rails_ ? PartOf(Chunk(chunk).count, self.rails_, rail) : Range{0, 0};
  }
  size_t Result(size_t chunk) const { return (Number(chunk) & 1) * kChunkBytes; }
  size_t Place(size_t chunk) const { return (Number(chunk) % kPlaces) * self.place_bytes_; }
  uint8_t* From(size_t chunk, int node) { return self.Incoming(node, Number(chunk) % kPlaces); }

  void operator()() {
    for (size_t i = 0; i < chunks + 2; ++i) {
      if (i >= 2) {
        CopyOut(i - 2);
      }
      if (i < chunks) {
        CopyIn(i);
        SumWithin(i, Segment(i, self.local_));
      }
      if (i >= 1 && i <= chunks) {
        SumBetween(i - 1, Segment(i - 1, self.local_));
      }
    }
    self.chunk_ += chunks;
  }

  // Puts what other ranks of the node will sum where they can read it.
  void CopyIn(size_t chunk) {
    if (locals == 1) {
      return;
    }
    auto* to = self.In(Number(chunk), self.local_);
    const auto* from = data + Chunk(chunk).begin * size;
    for (int rail = 0; rail < self.rails_; ++rail) {
      const auto segment = Segment(chunk, rail);
      if (rail != self.local_ && segment.count > 0) {
        std::memcpy(to + segment.begin * size, from + segment.begin * size, segment.count * size);
      }
    }
    self.Announce(header().words[self.local_].in, Number(chunk));
  }

  // Sums this rank's segment over its node, and sends it on its way to the other nodes. That all ranks have put in
  // this chunk says, too, that they have copied out the one before the last, whose place the sum takes.
  void SumWithin(size_t chunk, Range segment) {
    if (segment.count == 0) {
      return;
    }
    auto* sum = results + Result(chunk) + segment.begin * size;
    for (int local = 0; local < locals; ++local) {
      if (local != self.local_) {
        self.Await(header().words[local].in, Number(chunk), local);
      }
    }
    auto from = [&](int local) {
      auto* all = local == self.local_ ? data + Chunk(chunk).begin * size : self.In(Number(chunk), local);
      return all + segment.begin * size;
    };
    if (locals == 1) {
      std::memcpy(sum, from(0), segment.count * size);
    } else {
      reduce(sum, from(0), from(1), segment.count);
    }
    for (int local = 2; local < locals; ++local) {
      reduce(sum, sum, from(local), segment.count);
    }
    for (int step = 1; step < nodes; ++step) {
      const int node = (self.node_ + step) % nodes;
      const auto part = nodes == 2 ? Range{0, segment.count} : PartOf(segment.count, nodes, node);
      if (part.count > 0) {
        self.peers_[node].sum_out->send(Result(chunk) + (segment.begin + part.begin) * size, part.count * size,
                                        Place(chunk));
      }
    }
  }

  void SumBetween(size_t chunk, Range segment) {
    if (segment.count == 0) {
      // Nobody waits for it. But a word that stood still for 2^31 chunks would be ahead of the next one.
      if (locals > 1) {
        header().words[self.local_].out.store(Number(chunk), std::memory_order_release);
      }
      return;
    }
    if (nodes == 2) {
      auto& peer = self.peers_[1 - self.node_];
      auto* sum = results + Result(chunk) + segment.begin * size;
      peer.sum_in->waitRecv();
      peer.sum_out->waitSend();  // the sum is about to change
      const auto* other = From(chunk, 1 - self.node_);
      reduce(sum, self.node_ == 0 ? sum : other, self.node_ == 0 ? other : sum, segment.count);
    } else if (nodes > 2) {
      SumAndGather(chunk, segment);
    }
    if (locals > 1) {
      self.Announce(header().words[self.local_].out, Number(chunk));
    }
  }

  // Sums this rank's part of its segment in the order of the nodes, and exchanges the totals. A total arrives in the
  // place of the part that was sent for it, and so after that was read.
  void SumAndGather(size_t chunk, Range segment) {
    const auto part = PartOf(segment.count, nodes, self.node_);
    const size_t offset = Result(chunk) + (segment.begin + part.begin) * size;
    if (part.count > 0) {
      for (int node = 0; node < nodes; ++node) {
        if (node != self.node_) {
          self.peers_[node].sum_in->waitRecv();
        }
      }
      auto* mine = results + offset;
      if (self.node_ > 0) {
        for (int node = 1; node < self.node_; ++node) {
          reduce(From(chunk, 0), From(chunk, 0), From(chunk, node), part.count);
        }
        reduce(mine, From(chunk, 0), mine, part.count);
      }
      for (int node = self.node_ + 1; node < nodes; ++node) {
        reduce(mine, mine, From(chunk, node), part.count);
      }
      for (int step = 1; step < nodes; ++step) {
        self.peers_[(self.node_ + step) % nodes].total_out->send(offset, part.count * size, offset);
      }
    }
    for (int node = 0; node < nodes; ++node) {
      if (node != self.node_ && PartOf(segment.count, nodes, node).count > 0) {
        self.peers_[node].total_in->waitRecv();
        self.peers_[node].sum_out->waitSend();
      }
      if (node != self.node_ && part.count > 0) {
        self.peers_[node].total_out->waitSend();
      }
    }
  }

  void CopyOut(size_t chunk) {
    for (int local = 0; local < self.rails_; ++local) {
      if (local != self.local_ && Segment(chunk, local).count > 0) {
        self.Await(header().words[local].out, Number(chunk), local);
      }
    }
    const auto range = Chunk(chunk);
    std::memcpy(data + range.begin * size, results + Result(chunk), range.count * size);
  }
};

void GlooHierarchy::Allreduce(void* data, size_t elements, size_t element_size, Reduce reduce) {
  if (elements == 0 || context_->size == 1) {
    return;
  }
  try {
    Run run{*this, static_cast<uint8_t*>(data), elements, element_size, reduce};
    run();
  } catch (...) {
    Abort();
    throw;
  }
}

} // namespace common
} // namespace horovod
