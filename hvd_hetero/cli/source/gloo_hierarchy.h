// Part of hvd_hetero; `hvd-hetero build-horovod` adds this file to Horovod's source. Apache-2.0.
//
// An all-reduce over Gloo in two levels: within a node through shared memory, between nodes over the network.
//
//   1. Each rank puts its data where the ranks of its node can read it. The first R ranks of each node (R: the fewest
//      ranks of any node) own a segment each and sum it over their node: reduce-scatter, without a byte on a socket.
//   2. The owners of the same segment, one per node, sum over the nodes: for two nodes one exchange, else a direct
//      reduce-scatter and all-gather. Together they send each byte across once per direction, as a ring over nodes
//      does; a ring over ranks that are in order of nodes sends (n - 1) / n * 2 times that.
//   3. Each rank copies the result out of its node's memory: all-gather.
//
// Sums are taken in the order of ranks within a node, then in the order of nodes, whatever a tensor's size or place in
// a fused buffer: the result is the same on all ranks, and reproducible, bit for bit. Gloo's ring sums each segment in
// another order.

#ifndef HVD_HETERO_GLOO_HIERARCHY_H
#define HVD_HETERO_GLOO_HIERARCHY_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gloo/context.h"
#include "gloo/transport/buffer.h"

namespace horovod {
namespace common {

class GlooHierarchy {
public:
  // c[i] = a[i] op b[i] for n elements; c may be a or b.
  typedef void (*Reduce)(void* c, const void* a, const void* b, size_t n);

  // Whether HOROVOD_GLOO_ALLREDUCE=hierarchical was set when first asked.
  static bool Enabled();

  // Throws std::invalid_argument for a HOROVOD_GLOO_ALLREDUCE that is not known.
  static void CheckVariable();

  // A collective call: all ranks of the context make one. It finds out which ranks share a node, and gives them shared
  // memory. Where that fails on any node, Usable() is false on all ranks.
  explicit GlooHierarchy(std::shared_ptr<gloo::Context> context);
  ~GlooHierarchy();

  GlooHierarchy(const GlooHierarchy&) = delete;
  GlooHierarchy& operator=(const GlooHierarchy&) = delete;

  bool Usable() const { return usable_; }

  // Reduces `data` over all ranks, in place. Throws gloo::Exception when a peer is gone or too late.
  void Allreduce(void* data, size_t elements, size_t element_size, Reduce reduce);

private:
  struct Header;  // in the shared memory
  struct Run;     // one all-reduce

  struct Peer {
    std::unique_ptr<gloo::transport::Buffer> sum_out, sum_in, total_out, total_in;
  };

  bool FindNodes();
  bool ShareMemory();
  void ConnectNodes();
  void Unmap();
  void Abort() noexcept;
  void Announce(std::atomic<uint32_t>& word, uint32_t chunk);
  void Await(const std::atomic<uint32_t>& word, uint32_t chunk, int local);

  uint8_t* In(uint32_t chunk, int local) const;
  uint8_t* Results();
  uint8_t* Incoming(int node, uint32_t place);

  std::shared_ptr<gloo::Context> context_;
  std::vector<std::vector<int>> nodes_;  // the ranks of each node
  int node_ = 0;                         // this rank's node
  int local_ = 0;                        // its index there
  int rails_ = 1;                        // segments, and owners of one per node
  bool usable_ = false;
  uint8_t* memory_ = nullptr;
  size_t memory_bytes_ = 0;
  uint32_t chunk_ = 0;  // chunks done so far; counts over, as the words in the header do
  std::vector<uint8_t> alone_;  // the results of a node of one rank
  std::vector<uint8_t> incoming_;
  size_t place_bytes_ = 0;
  std::vector<Peer> peers_;  // by node: the owner of the same segment there
};

} // namespace common
} // namespace horovod

#endif // HVD_HETERO_GLOO_HIERARCHY_H
