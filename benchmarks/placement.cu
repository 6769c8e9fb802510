// Prints which SMs share a GPC, and on which GPC the clusters of a launch land, one CTA an SM, and how many on each where they are fewer or SMs have
// room for four:
//
//   nvcc -O2 -std=c++17 -gencode arch=compute_90a,code=sm_90a benchmarks/placement.cu -o placement && ./placement
//
// SMs that were ever in one cluster share a GPC; a GPC's other SMs, which no cluster of more than two reaches, count as GPCs of their own.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

constexpr int kLaunches = 6, kFills = 214 << 10, kFourth = 54 << 10;  // bytes of shared memory that leave no room for another CTA, or for three

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(1);
}

__global__ void where(int* sms, int cycles) {
  int sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (threadIdx.x == 0) sms[blockIdx.x * gridDim.y + blockIdx.y] = sm;
  for (long long const begin = clock64(); clock64() - begin < cycles;) {
  }
}

// The SM of each CTA, those of a cluster one after another if it is along x or y.
std::vector<int> sms_of(int clusters, int along_x, int along_y, int bytes, int cycles) {
  static int* sms = nullptr;
  if (sms == nullptr) check(cudaMalloc(&sms, 1 << 20));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(along_x), unsigned(along_y), 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * along_x, along_y), config.blockDim = bytes == kFourth ? 160 : 384, config.dynamicSmemBytes = bytes;
  config.attrs = &attribute, config.numAttrs = along_x * along_y > 1;
  check(cudaLaunchKernelEx(&config, where, sms, cycles));
  std::vector<int> result(clusters * along_x * along_y);
  check(cudaMemcpy(result.data(), sms, result.size() * sizeof(int), cudaMemcpyDeviceToHost));
  return result;
}

int main() {
  check(cudaFuncSetAttribute(where, cudaFuncAttributeMaxDynamicSharedMemorySize, kFills));
  check(cudaFuncSetAttribute(where, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  int sms;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));

  std::vector<int> parent(sms), gpc(sms);
  std::iota(parent.begin(), parent.end(), 0);
  auto const root = [&](int sm) {
    while (parent[sm] != sm) sm = parent[sm];
    return sm;
  };
  for (int const size : {2, 4, 8, 16}) {
    for (int launch = 0; launch < 200; ++launch) {
      auto const at = sms_of(512 / size, size, 1, 0, 2000);
      for (size_t i = 0; i < at.size(); ++i) parent[root(at[i])] = root(at[i / size * size]);
    }
  }
  std::printf("GPC of each SM:");
  std::vector<int> number(sms, -1);  // of the GPC of a root
  for (int sm = 0, gpcs = 0; sm < sms; ++sm) {
    if (number[root(sm)] < 0) number[root(sm)] = gpcs++;
    std::printf(" %d", gpc[sm] = number[root(sm)]);
  }
  std::printf("\n");
  int const clusters[][2] = {{1, 1}, {1, 2}, {2, 1}, {1, 4}, {4, 1}, {2, 2}, {2, 4}, {4, 2}};
  for (auto const& [along_x, along_y] : clusters) {
    int const size = along_x * along_y, count = (size > 2 ? sms * 10 / 11 : sms) / size;
    for (int launch = 0; launch < kLaunches; ++launch) {
      auto const at = sms_of(count, along_x, along_y, kFills, 6000);
      std::printf("%dx%d:", along_x, along_y);
      for (int cluster = 0; cluster < count; ++cluster) std::printf(" %d", gpc[at[cluster * size]]);
      std::printf("\n");
    }
  }
  int const few[][3] = {{1, 24, kFills}, {1, 40, kFills}, {1, 66, kFills}, {1, 96, kFills}, {1, 124, kFills}, {2, 20, kFills}, {2, 33, kFills},
                        {2, 42, kFills}, {2, 50, kFills}, {2, 60, kFills}, {4, 12, kFills}, {4, 20, kFills}, {4, 26, kFills}, {1, 96, kFourth},
                        {1, 160, kFourth}, {1, 192, kFourth}, {1, 224, kFourth}, {1, 288, kFourth}, {1, 448, kFourth}};
  for (auto const& [size, count, bytes] : few) {
    auto const at = sms_of(count, size, 1, bytes, 20000);
    std::vector<int> clusters(sms);
    for (int cluster = 0; cluster < count; ++cluster) ++clusters[gpc[at[cluster * size]]];
    std::printf("%d clusters of %d, room for %d; clusters on GPC 0, 1, ...:", count, size, bytes == kFourth ? 4 : 1);
    for (int i = 0; i <= *std::max_element(gpc.begin(), gpc.end()); ++i) std::printf(" %d", clusters[i]);
    std::printf("\n");
  }
}
