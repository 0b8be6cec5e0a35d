#include "runtime/kernels/cuda/sdpa.h"

#ifdef TESSERA_HAS_CUDNN_FRONTEND

#include <cudnn.h>
#include <dlfcn.h>

// The library is opened when it is asked for, so that programs start without
// it.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cudnn_frontend.h>

#include <exception>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/kernels/cuda/queue.h"

namespace cudnn_frontend {

void* cudnn_dlhandle = nullptr;  // where cudnn-frontend looks for functions

}  // namespace cudnn_frontend

namespace tessera {
namespace {

namespace fe = cudnn_frontend;

enum Uid : int64_t { kQ = 1, kK, kV, kO, kLse, kDo, kDq, kDk, kDv };

class CudnnSdpa : public CudaSdpa {
 public:
  explicit CudnnSdpa(cudnnHandle_t handle) : handle_(handle) {}
  CudnnSdpa(const CudnnSdpa&) = delete;
  CudnnSdpa& operator=(const CudnnSdpa&) = delete;
  ~CudnnSdpa() override {
    for (void* scratch : scratch_) cudaFree(scratch);
    fe::detail::destroy_handle(handle_);
  }

  bool Takes(const SdpaProblem& problem) override {
    const auto known = graphs_.find(problem);
    if (known != graphs_.end()) return known->second != nullptr;
    return (graphs_[problem] = MakeGraph(problem)) != nullptr;
  }

  void Run(const SdpaProblem& problem, const SdpaData& data,
           CudaQueue& queue) override {
    std::unordered_map<int64_t, void*> pointers = {
        {kQ, const_cast<void*>(data.q)},
        {kK, const_cast<void*>(data.k)},
        {kV, const_cast<void*>(data.v)},
        {kO, data.o},
        {kLse, data.lse},
    };
    if (problem.backward) {
      pointers[kDo] = const_cast<void*>(data.d_o);
      pointers[kDq] = data.dq;
      pointers[kDk] = data.dk;
      pointers[kDv] = data.dv;
    }
    try {
      const auto set = fe::detail::set_stream(handle_, queue.stream);
      if (set != CUDNN_STATUS_SUCCESS) {
        return queue.Fail("cudnnSetStream: status " + std::to_string(set));
      }
      auto done = graphs_.at(problem)->execute(
          handle_, pointers, scratch_.empty() ? nullptr : scratch_.back());
      if (done.is_bad()) queue.Fail("cuDNN attention: " + done.get_message());
    } catch (const std::exception& error) {
      queue.Fail(std::string("cuDNN attention: ") + error.what());
    }
  }

 private:
  using Graph = fe::graph::Graph;
  using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

  // Null where cuDNN has no kernel, or there is no memory for its scratch.
  std::unique_ptr<Graph> MakeGraph(const SdpaProblem& p) {
    try {
      auto graph = std::make_unique<Graph>();
      graph
          ->set_io_data_type(p.dtype == DType::kBFloat16
                                 ? fe::DataType_t::BFLOAT16
                                 : fe::DataType_t::HALF)
          .set_intermediate_data_type(fe::DataType_t::FLOAT)
          .set_compute_data_type(fe::DataType_t::FLOAT);
      p.backward ? DescribeBackward(p, *graph) : DescribeForward(p, *graph);
      if (graph->build(handle_, {fe::HeurMode_t::A}).is_bad()) return nullptr;
      int64_t bytes = 0;
      if (graph->get_workspace_size(bytes).is_bad() || !Reserve(bytes)) {
        return nullptr;
      }
      return graph;
    } catch (const std::exception&) {
      return nullptr;
    }
  }

  // A tensor of heads in our order of dimensions, (sample, position, head,
  // width), as cuDNN names them: (sample, head, position, width). Positions are
  // `stride` apart, 0: without gaps.
  static fe::graph::Tensor_attributes Heads(const SdpaProblem& p, Uid uid,
                                            int64_t heads, int64_t width,
                                            int64_t stride = 0) {
    if (stride == 0) stride = heads * width;
    return fe::graph::Tensor_attributes()
        .set_uid(uid)
        .set_dim({p.samples, heads, p.length, width})
        .set_stride({p.length * stride, width, stride, 1});
  }
  static void SetOutput(const Tensor& tensor, Uid uid,
                        const fe::graph::Tensor_attributes& like) {
    tensor->set_output(true)
        .set_uid(uid)
        .set_dim(like.get_dim())
        .set_stride(like.get_stride());
  }
  static fe::graph::Tensor_attributes Statistics(const SdpaProblem& p) {
    return fe::graph::Tensor_attributes()
        .set_uid(kLse)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({p.samples, p.heads, p.length, 1})
        .set_stride({p.heads * p.length, p.length, 1, 1});
  }

  static void DescribeForward(const SdpaProblem& p, Graph& graph) {
    const auto q = graph.tensor(Heads(p, kQ, p.heads, p.d));
    const auto k = graph.tensor(Heads(p, kK, p.groups, p.d));
    const auto v = graph.tensor(Heads(p, kV, p.groups, p.e));
    const auto [o, lse] = graph.sdpa(
        q, k, v,
        fe::graph::SDPA_attributes()
            .set_generate_stats(true)
            .set_attn_scale(p.scale)
            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
            .set_diagonal_band_right_bound(0));
    SetOutput(o, kO, Heads(p, kO, p.heads, p.e));
    SetOutput(lse, kLse, Statistics(p));
    lse->set_data_type(fe::DataType_t::FLOAT);
  }

  static void DescribeBackward(const SdpaProblem& p, Graph& graph) {
    const auto q = graph.tensor(Heads(p, kQ, p.heads, p.d));
    const auto k = graph.tensor(Heads(p, kK, p.groups, p.d));
    const auto v = graph.tensor(Heads(p, kV, p.groups, p.e));
    const auto o = graph.tensor(Heads(p, kO, p.heads, p.e));
    const auto d_o = graph.tensor(Heads(p, kDo, p.heads, p.e));
    const auto lse = graph.tensor(Statistics(p));
    const auto [dq, dk, dv] = graph.sdpa_backward(
        q, k, v, o, d_o, lse,
        fe::graph::SDPA_backward_attributes()
            .set_attn_scale(p.scale)
            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
            .set_diagonal_band_right_bound(0)
            .set_deterministic_algorithm(p.deterministic));
    SetOutput(dq, kDq, Heads(p, kDq, p.heads, p.d, p.dq_stride));
    SetOutput(dk, kDk, Heads(p, kDk, p.groups, p.d, p.dk_stride));
    SetOutput(dv, kDv, Heads(p, kDv, p.groups, p.e, p.dv_stride));
  }

  // All graphs share the largest scratch memory, as they run one after the
  // other. Smaller ones stay: captured graphs may hold them.
  bool Reserve(int64_t bytes) {
    if (bytes <= scratch_bytes_) return true;
    void* data = nullptr;
    if (cudaMalloc(&data, static_cast<size_t>(bytes)) != cudaSuccess) {
      cudaGetLastError();  // clears it
      return false;
    }
    scratch_.push_back(data);
    scratch_bytes_ = bytes;
    return true;
  }

  cudnnHandle_t handle_;
  std::map<SdpaProblem, std::unique_ptr<Graph>> graphs_;  // null: none
  std::vector<void*> scratch_;
  int64_t scratch_bytes_ = 0;
};

}  // namespace

std::unique_ptr<CudaSdpa> MakeCudnnSdpa() {
  if (fe::cudnn_dlhandle == nullptr) {
    fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW);
  }
  if (fe::cudnn_dlhandle == nullptr) return nullptr;
  try {
    cudnnHandle_t handle = nullptr;
    if (fe::detail::create_handle(&handle) != CUDNN_STATUS_SUCCESS) {
      return nullptr;
    }
    return std::make_unique<CudnnSdpa>(handle);
  } catch (const std::exception&) {  // a function that the library lacks
    return nullptr;
  }
}

}  // namespace tessera

#else

namespace tessera {

std::unique_ptr<CudaSdpa> MakeCudnnSdpa() {
  return nullptr;
}

}  // namespace tessera

#endif
