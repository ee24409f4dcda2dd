// The programs that tessera-pack compiles ahead.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::cuda {

struct PackEntry {
  std::string name;
  std::string text;
  int dynamic_shared = 0;
};

[[nodiscard]] std::vector<PackEntry> pack_list(std::string_view arch);
// Every kernel that the plan can choose, for a look at what is not in the pack: thousands.
[[nodiscard]] std::vector<PackEntry> every_list(std::string_view arch);

}  // namespace tessera::cuda
