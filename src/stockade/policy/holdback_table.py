"""The table of files that programs of the host run or obey; `holdback_lookup` says how patterns match.

`OBEYED` are files that take effect unasked: a tool runs or obeys them because they are there, when a shell
enters a directory, an editor opens it, an agent starts in it, or a commit is made or pushed; or they bend a
tool of the user's to something else than the project says (another interpreter, registry or wrapper).
`RUNS` are the project's own code and build files: they run at the user's next command. Files that only
choose between versions of a tool are in neither. `CACHES` hold code that a tool has compiled and compiles
again: it is left out of a commit. docs/reference/holdback.md is made from this table.
"""

from __future__ import annotations

from typing import NamedTuple


class ToolFile(NamedTuple):
    """What one tool does with some files."""

    #: Patterns, with spaces between them.
    patterns: str
    tool: str
    #: What the tool does with such a file: the sentence goes on from the tool's name.
    does: str
    #: The advisory or the publication that shows it.
    advisory: str = ""
    #: Whether the tool looks for these capitals, so that other ones are an ordinary file's.
    exact: bool = False
    #: Whether it counts in the project's own files only, and not in packages that the project uses.
    own: bool = False
    #: Whether no tool does more once the file is gone: a program, an environment, a record of work under way.
    #: The removal of any other file that is obeyed is held back, since it may be what restricts the tool.
    removable: bool = False

    @property
    def why(self) -> str:
        """The reason, for the user."""
        return f"{self.tool} {self.does}"


CI = "runs it when the repository is pushed"
START = "runs it when it starts"
OPEN = "obeys it when the project is opened, or runs the commands in it"
RULES = "takes instructions, tools and commands from it when it starts in the project"
HOOKS = "runs the commands in it at the next commit, push or checkout"
BUILD = "runs it at the next build"
LINT = "loads the code that it names when it next runs, also from an editor"
ENTER = "loads it when a shell enters the directory"
LOGIN = "starts what it names at the next login"
HOME = "obeys it for every command of yours"

#: Files that would match and that no tool obeys, or that are in a cache.
PASSED = (
    ToolFile(".git/**/hooks/*.sample", "git", "leaves samples alone"),
    ToolFile("__pycache__/*.py{c,o}", "Python", "makes it again"),
)

#: What is left out of a commit: code that you cannot read, which a tool runs in place of the source beside it. No
#: header of such a file proves anything: the program inside writes the time and the size of the clean source.
AGAIN = "makes it again from the source, and would run it in its place"
CACHES = (
    ToolFile("__pycache__/", "Python", AGAIN),
    ToolFile("tmp/cache/bootsnap/", "Rails", AGAIN),
)

# fmt: off
OBEYED = (
    # Version control
    ToolFile(".git", "git", "finds the repository through it, and obeys its configuration and hooks",
          "Pillar Security, The Week of Sandbox Escapes (git)", removable=True),
    ToolFile(".git/**/hooks/**", "git", HOOKS, "CVE-2026-26268"),
    ToolFile(".git/**/config{,.worktree}", "git", "runs the commands that it names, such as core.fsmonitor",
          "CVE-2026-26268"),
    ToolFile(".git/**/{commondir,gitdir}", "git", "reads its configuration where this file says",
          "Pillar Security, The Week of Sandbox Escapes (git)", removable=True),
    ToolFile(".git/{remotes,branches}/", "git", "fetches from and pushes to where it says", removable=True),
    ToolFile(".git/**/{rebase-merge,rebase-apply,sequencer}/", "git",
          "goes on with the commands in it at the next rebase, cherry-pick or revert", removable=True),
    ToolFile("git~1", "git", "takes it for .git on file systems that know short names", "CVE-2014-9390",
          removable=True),
    ToolFile(".gitconfig .gitconfig.local .config/git/ .git-templates/ .git-template/ .git-credentials", "git",
          HOME),
    ToolFile(".git/lazygit.yml .lazygit.yml .git/glab-cli/ .config/{lazygit,glab-cli}/", "lazygit or glab",
          "runs the commands that it names, editors and pagers among them"),
    ToolFile(".lfsconfig", "git-lfs", "sends and fetches files where it says", own=True),
    ToolFile(".hg/**/hgrc .hg/**/hgrc-not-shared .hg/**/{sharedpath,shared,requires} .hgrc .config/hg/",
          "Mercurial", "runs the hooks and loads the extensions that it names"),
    ToolFile(".jj/repo .jj/**/*config.toml .jj/**/{*config-id,git_target} .jj/**/store/type .jjconfig.toml "
          ".config/jj/", "Jujutsu", "runs the commands that it names, or uses the repository that it names"),
    ToolFile(".sl/**/{config,hgrc,sharedpath,requires} .config/sapling/", "Sapling",
          "runs the hooks that it names"),
    ToolFile(".subversion/", "Subversion", "runs the commands that it names (editors, tunnels)"),
    ToolFile(".fslckout _FOSSIL_ .fossil .fossil-settings/", "Fossil", "takes its settings from it"),
    ToolFile(".bzr/**/branch.conf .bazaar/ .config/breezy/", "Breezy", "takes hooks and aliases from it"),
    ToolFile("_darcs/prefs/ .darcs/", "darcs", "runs the commands that it names around its own"),
    ToolFile(".pijul/config .config/pijul/", "Pijul", "runs the hooks that it names"),
    ToolFile("_MTN/monotonerc .monotone/", "Monotone", START),
    ToolFile("CVS/Root .cvsrc", "CVS", "connects by the command and to the place that it names"),
    ToolFile(".p4config .p4enviro .p4aliases", "Perforce", HOME),
    ToolFile(".repo/", "repo", "runs its own program out of it", removable=True),
    ToolFile(".gclient .gclient_entries", "gclient", "runs it as Python"),
    ToolFile(".west/config", "west", "takes its commands from where it says"),
    ToolFile(".dvc/config{,.local}", "DVC", "fetches data where it says"),
    # Hook managers
    ToolFile(".githooks/ .git-hooks/ .git_hooks/ githooks/ git-hooks/ git_hooks/ .hooks/", "git",
          "runs what is in it where core.hooksPath names it", own=True),
    ToolFile(".husky/ .huskyrc .huskyrc.{js,cjs,json,yml,yaml} .config/husky/", "husky", HOOKS, own=True),
    ToolFile("{,.,.config/}lefthook{,-local}.{yml,yaml,toml,json,jsonc} .lefthook/ .lefthook-local/", "lefthook",
          HOOKS, own=True),
    ToolFile(".pre-commit-config.{yaml,yml} prek.toml .prek.toml", "pre-commit", HOOKS, own=True),
    ToolFile(".overcommit.yml .local-overcommit.yml", "overcommit", HOOKS, own=True),
    ToolFile("{,.}simple-git-hooks.{js,cjs,mjs,json}", "simple-git-hooks", HOOKS, own=True),
    ToolFile("{,.}hk.pkl hk.local.pkl .config/hk.pkl", "hk", HOOKS, own=True),
    ToolFile("captainhook.json grumphp.yml{,.dist} .rusty-hook.toml .cargo-husky/ cog.toml .trunk/ "
          ".qlty/ {,.}nano-staged.{js,cjs,mjs,json}", "a hook manager",
          HOOKS, own=True),
    ToolFile(".lintstagedrc .lintstagedrc.* lint-staged.config.*", "lint-staged", HOOKS, own=True),
    # Shells, terminals, the desktop
    ToolFile(".bashrc .bash_profile .bash_login .bash_logout .bash_aliases .bash_completion .bashrc.d/ .profile "
          ".bashrc.local",
          "bash", "runs it when a shell starts or ends", "CVE-2026-50548"),
    ToolFile(".zshrc .zshenv .zprofile .zlogin .zlogout .zshrc.local .zimrc .zpreztorc .p10k.zsh .oh-my-zsh/ "
          ".zsh/ .config/zsh/", "zsh", "runs it when a shell starts or ends", "CVE-2026-50548"),
    ToolFile(".kshrc .mkshrc .shrc .shinit .yashrc .yash_profile .rcrc .cshrc .tcshrc .login .logout",
          "the shell",
          "runs it when a shell starts or ends"),
    ToolFile(".config/{fish,elvish,xonsh,nushell,powershell}/ .xonshrc .elvish/ "
          "*powershell/*profile.ps1 Microsoft.PowerShell_profile.ps1", "the shell", START),
    ToolFile(".inputrc .lesskey .lessfilter .config/lesskey .mailcap .pam_environment .config/environment.d/ "
          ".config/starship.toml", "the shell", "and the programs in it obey it"),
    ToolFile(".tmux.conf .tmux/ .config/tmux/ .screenrc .byobu/ .tmate.conf .config/zellij/", "the multiplexer",
          START),
    ToolFile(".wezterm.lua .alacritty.{toml,yml} .config/{alacritty,kitty,wezterm,foot,ghostty}/",
          "the terminal", START),
    ToolFile(".xinitrc .xsession .xsessionrc .xprofile .xserverrc .Xresources .Xdefaults .xbindkeysrc .fehbg",
          "the X session", LOGIN),
    ToolFile(".config/{autostart,systemd,plasma-workspace,sway,i3,hypr,awesome,bspwm,sxhkd,openbox,qtile,niri,"
          "river,labwc,xmonad,waybar,polybar,rofi,dunst,eww}/ .xscreensaver .conkyrc "
          ".config/user-dirs.dirs .xmonad/ .kde/Autostart/ .kde4/Autostart/",
          "the desktop session", LOGIN),
    ToolFile(".local/share/{applications,dbus-1,systemd,nautilus,nemo,kio,kservices5,thumbnailers,mime}/ "
          "Desktop/*.desktop", "the desktop", "starts what it names for files and services"),
    ToolFile(".directory", "KDE", "reads it when the directory is shown, and once ran commands in it",
          "CVE-2019-14744"),
    ToolFile(".asoundrc .config/pulse/ .gtkrc-2.0 .config/gtk-{2,3,4}.0/ .config/mpv/ .mpv/", "the desktop",
          "loads the modules and scripts that it names"),
    ToolFile(".config/crontab .crontab .forward .procmailrc .muttrc .neomuttrc .mutt/ .config/{mutt,neomutt}/ "
          ".fetchmailrc .mbsyncrc .msmtprc .offlineimaprc", "cron and mail",
          "run the commands that it names"),
    ToolFile(".local/bin/", "the shell", "finds programs in it before or beside the system's", removable=True),
    # Your own configuration, where a home directory is the workspace
    ToolFile(".ssh/ .rhosts .shosts", "ssh", "obeys it: who may log in, and which commands run"),
    ToolFile(".gnupg/ .password-store/", "GnuPG", "runs the programs that it names"),
    ToolFile(".netrc .curlrc .wgetrc .config/curlrc", "curl", HOME),
    ToolFile(".docker/ .kube/ .aws/ .azure/ .config/{gcloud,gh,containers,helm,op,doctl}/ .terraformrc "
          ".terraform.d/ .s3cfg .boto", "the command of that service",
          "runs the helpers that it names, and logs in where it says"),
    ToolFile(".nanorc .config/nano/ .hyper.js .rtorrent.rc .vifm/ .irssi/ .weechat/ .luarocks/ .cpan/ "
          ".java.policy .npm-init.js .config/{rtorrent,ranger,lf,nnn,vifm,weechat,nix,nixpkgs,home-manager}/ "
          ".nixpkgs/", "the program of that name", "runs the commands that it names"),
    ToolFile(".ackrc", "ack", "takes options from it, a command for its output among them once",
          "CVE-2013-7069"),
    ToolFile(".sops.yaml .gpg-id", "sops and pass", "encrypt to the keys that it names", own=True),
    ToolFile(".psqlrc .sqliterc .my.cnf .mylogin.cnf .mongorc.js .mongoshrc.js .duckdbrc",
          "the database's shell", START),
    ToolFile(".nvm/ .pyenv/ .rbenv/ .nodenv/ .asdf/ .asdfrc .sdkman/ .rustup/ .ghcup/ .volta/ .deno/bin/ "
          ".bun/bin/ .cargo/bin/ .juliaup/ .local/share/{mise,uv,pipx,fnm,gh}/", "the shell",
          "runs the programs that are installed in it", removable=True),
    ToolFile(".config/stockade/ .local/state/stockade/", "Stockade", "takes your policies and trust from it"),
    ToolFile("stockade.toml", "Stockade", "takes the policy of the next run from it"),
    # Environment managers
    ToolFile(".envrc .envrc.* .direnvrc .config/direnv/ .direnv/", "direnv", ENTER),
    ToolFile(".env", "editors, docker compose and shells", "load variables from it, such as LD_PRELOAD, unasked",
          own=True),
    ToolFile(".env.leave .autoenv .autoenv.zsh .autoenv_leave.zsh .shadowenv.d/ .ondirrc .smartcd/", "the shell",
          ENTER),
    ToolFile("{,.}mise{,.local,.*}.toml .mise/ mise/config{,.local,.*}.toml mise/{tasks,conf.d}/ .config/mise/ "
          ".config/mise{,.*}.toml "
          ".miserc.toml .rtx{,.local,.*}.toml .mise-tasks/ mise-tasks/", "mise", ENTER, own=True),
    ToolFile(".devbox/ .devenv/ .flox/ .pixi/config.toml .prototools .proto/ .pkgx.{yaml,yml} .vfox.toml .fvmrc "
          ".fvm/", "the environment manager", "puts the programs that it names into the shell or the editor",
          removable=True),
    ToolFile(".venv .virtualenvs/ etc/conda/{activate,deactivate}.d/", "the shell",
          "switches to the environment that it names, or runs it then", removable=True),
    ToolFile("bin/hermit bin/activate-hermit", "Hermit", "replaces the programs of the shell by it",
          removable=True),
    ToolFile(".rvmrc .rbenv-vars .ruby-env .versions.conf .powrc .powenv", "Ruby's version managers", ENTER),
    ToolFile("rust-toolchain rust-toolchain.toml", "rustup", "runs the compiler that it names, by path too"),
    ToolFile(".python-version .python-versions", "uv", "runs the interpreter that it names, by path too",
          own=True),
    ToolFile("lean-toolchain", "elan", "fetches and runs the compiler that it names", own=True),
    # Editors
    ToolFile(".vscode/ .vscode-server/ .theia/ *.code-workspace", "VS Code", OPEN,
          "Pillar Security, The Week of Sandbox Escapes (tasks.json)", own=True),
    ToolFile(".idea/ .fleet/ *.iml *.ipr *.iws", "JetBrains editors", OPEN, own=True, removable=True),
    ToolFile(".vs/ *.suo *.{cs,vb,fs,vcx}proj.user omnisharp.json", "Visual Studio", OPEN, own=True,
          removable=True),
    ToolFile(".project .classpath .factorypath .externalToolBuilders/ "
          ".settings/{org.eclipse.*,language.settings.xml}", "Eclipse",
          "runs builders and annotation processors from it when the project is opened", own=True,
          removable=True),
    ToolFile(".atom/ .ideavimrc .tm_properties .kateproject .kateconfig *.kdev4 .kdev4/ *.pro.user "
          ".lite_project.lua .lite_project/ "
          ".config/{Code,VSCodium,Cursor,JetBrains}/", "the editor", OPEN, own=True),
    ToolFile("Assets/**/Editor/** init_unreal.py userSetup.{py,mel}", "Unity, Unreal or Maya",
          "runs it when the project is opened", own=True, removable=True),
    ToolFile("local.properties", "Android's build", "runs the tools at the place that it names", own=True),
    ToolFile("*.sublime-project *.sublime-workspace", "Sublime Text", OPEN, own=True),
    ToolFile(".zed/ .helix/ .lapce/ .nova/ .kakrc .kak/ .config/{zed,helix,lapce,kak,micro,sublime-text}/",
          "the editor", "starts the language servers that it names when a file is opened"),
    ToolFile(".vimrc .gvimrc _vimrc .vimrc.local .lvimrc .local.vimrc .exrc .nvimrc .nvim.lua .exrc.lua .vim/ "
          ".nvim/ .config/{nvim,vim}/ .lazy.lua .neoconf.json .nlsp-settings/ coc-settings.json "
          ".ycm_extra_conf.py", "Vim", "runs it when it is started in the directory"),
    ToolFile(".emacs .emacs.el .emacs.d/ .config/{emacs,doom}/ .doom.d/ .spacemacs .spacemacs.d/ .dir-locals.el "
          ".dir-locals-2.el", "Emacs", "runs it when a file in the directory is opened"),
    ToolFile(".ropeproject/ .jedi/ .ruby-lsp/ {,.}rust-project.json .tern-project .phpactor.{json,yml}",
          "the language server",
          "runs the code, the commands and the plugins that it names when a file is opened", own=True),
    ToolFile(".luarc.json .luarc.jsonc rust-analyzer.toml .rust-analyzer.toml hie.yaml .lsp/config.edn .merlin "
          ".sourcekit-lsp/ .bsp/ .bloop/ .swiftpm/", "the language server",
          "runs the commands and plugins that it names when a file is opened", removable=True),
    # Coding agents
    ToolFile("AGENTS.md AGENTS.override.md AGENTS.local.md AGENT.md .agents.md .agent.md .agentrules",
          "every coding agent", "takes it for instructions of yours", exact=True),
    ToolFile("CLAUDE.md CLAUDE.local.md", "Claude Code", "takes it for instructions of yours", exact=True),
    ToolFile("GEMINI.md QWEN.md CRUSH.md OPENCODE.md WARP.md JULES.md IFLOW.md CODEBUDDY.md HERMES.md "
          ".hermes.md AMP.md SOUL.md HEARTBEAT.md skills/*/SKILL.md", "the coding agent",
          "takes it for instructions of yours", exact=True),
    ToolFile("codex.md CODEX.md replit.md", "the coding agent", "takes it for instructions of yours",
          exact=True, own=True),
    ToolFile(".claude/ .claude.json .claude-plugin/ .claude-flow/", "Claude Code, and Cursor with it,",
          "run the hooks and obey the settings in it", "CVE-2026-48124"),
    ToolFile(".mcp.json .mcp/ mcp.json mcp_config.json {,.}lsp.json claude_desktop_config.json",
          "every coding agent",
          "starts the servers that it names",
          own=True),
    ToolFile(".cursor/ .cursorrules .cursor-plugin/", "Cursor", RULES, "CVE-2026-48124"),
    ToolFile(".github/copilot-instructions.md .github/{hooks,agents,instructions,prompts,skills,chatmodes,"
          "copilot,extensions,plugin}/ .github/lsp.json .copilot/", "GitHub Copilot", RULES),
    ToolFile(".agents/ .agent/ .ai/ .aiassistant/ .rules .skills/ .specify/ .bmad-core/ .ruler/ .rulesync/ "
          ".serena/ .taskmaster/ hooks/hooks.json", "every coding agent", RULES, own=True),
    ToolFile("knowledge.md", "Codebuff", "takes it for instructions of yours", exact=True, own=True),
    ToolFile(".{cursor,cursorindexing,aider,gemini,qwen,claude,cline,roo,kilocode,codeium}ignore "
          ".{continue,augment,goose,copilot,aiassistant,ai}ignore .aiexclude", "the coding agent",
          "keeps away from the files that it names, and from no others", own=True),
    ToolFile(".codex/ .codex-plugin/", "Codex", RULES),
    ToolFile(".gemini/ .antigravity/ .idx/ .jules/", "Gemini CLI and Antigravity", RULES),
    ToolFile(".windsurf/ .windsurfrules .codeium/ .devin/", "Windsurf", RULES),
    ToolFile(".clinerules .clinerules/ .cline/", "Cline", RULES),
    ToolFile(".roo/ .roorules .roorules-* .roomodes .kilo/ .kilocode/ .kilocoderules .kilocodemodes "
          "kilo.json{,c}",
          "Roo Code and Kilo Code", RULES),
    ToolFile(".continue/ .continuerules .continuerc.json", "Continue", RULES),
    ToolFile(".aider.conf.yml .aider.conf.yaml .aider/ .aider.model.settings.yml .aider.model.metadata.json",
          "Aider", "takes its options from it, a test command among them"),
    ToolFile(".amazonq/ .kiro/", "Amazon Q and Kiro", RULES),
    ToolFile(".opencode/ opencode.json{,c} .opencode.json{,c}", "OpenCode", RULES),
    ToolFile(".crush/ {,.}crush.json", "Crush", RULES),
    ToolFile(".qwen/ .factory/ .junie/ .openhands/ .openhands_instructions .goose/ .goosehints .augment/ "
          ".augment-guidelines .amp/ .config/amp/ .warp/ .trae/ .traerules .tabnine/ .cody/ .sourcegraph/ "
          ".bolt/ .voidrules .plandex/ .mentat/ .mentat_config.json .qodo/ .rovodev/ .vibe/ .kimi/ .iflow/ "
          ".codebuddy/ .qoder/ .letta/ .pi/ .openclaw/ .hermes/ gptme.toml sweep.yaml .pr_agent.toml "
          ".zencoder/ "
          ".lingma/ .grok/ .forge/ .conductor/ conductor.json .terragon/ terragon-setup.sh .firebender/ "
          "firebender.json .airules .ai-rules/ .mux/ .superset/ .emdash.json {,.}codebuff.json "
          ".codiumai.toml "
          ".config/goose/ .blackboxrules .refact/ .bob/ .bobrules .bobmodes .container-use/",
          "the coding agent", RULES),
    # Cloud workspaces and containers
    ToolFile(".devcontainer/ .devcontainer.json devcontainer.json", "editors",
          "run the commands in it, on the host too (initializeCommand), when the container is opened",
          own=True),
    ToolFile(".gitpod.yml .gitpod.Dockerfile {,.}devfile.y{,a}ml .codesandbox/ .stackblitzrc .replit replit.nix "
          ".daytona.yaml .coder/ .ona/ .gitpod/", "the cloud workspace",
          "runs the commands in it when it is opened", own=True),
    ToolFile("{docker-,}compose.override.y{,a}ml docker-bake.override.{hcl,json}", "docker",
          "lays it over the project's own file without being asked", own=True),
    # Forges and their pipelines
    ToolFile(".github/{workflows,actions}/", "GitHub", CI, own=True),
    ToolFile(".github/{settings,mergify,renovate,dependabot}.{yml,yaml,json,json5} {,.}mergify.yml .mergify/ "
          ".kodiak.toml .pullapprove.yml .dependabot/ "
          ".pyup.yml .restyled.y{,a}ml "
          "{,.gitlab/}renovate.json{,5} .renovaterc .renovaterc.json{,5}", "the repository's bot",
          "changes the repository as it says", own=True),
    ToolFile(".coderabbit.y{,a}ml greptile.json .sourcery.yaml ellipsis.yaml .deepsource.toml .codeclimate.yml "
          ".codacy.y{,a}ml .hound.yml", "the review bot",
          "takes instructions from it", own=True),
    ToolFile("CODEOWNERS", "the forge", "asks the people in it for reviews, and no others",
          exact=True, own=True),
    ToolFile(".{gitea,forgejo}/{workflows,actions}/", "Gitea and Forgejo", CI, own=True),
    ToolFile(".gitlab-ci.y{,a}ml .gitlab-ci.*.y{,a}ml *.gitlab-ci.y{,a}ml .gitlab-ci/ .gitlab/{ci,agents,duo}/",
          "GitLab", CI, own=True),
    ToolFile(".woodpecker/ .woodpecker.y{,a}ml .drone.{yml,yaml,star,jsonnet,script}", "Woodpecker and Drone",
          CI,
          own=True),
    ToolFile(".travis.y{,a}ml .circleci/ circle.yml .cirrus.{yml,star} {,.}appveyor.yml .semaphore/ .teamcity/ "
          "wercker.yml shippable.yml codeship-{services,steps}.yml .scrutinizer.yml codefresh.y{,a}ml "
          ".harness/ "
          "bitrise.yml codemagic.yaml .screwdriver.yaml screwdriver.yaml .buildkite/ buildkite.y{,a}ml "
          ".taskcluster.yml bamboo-specs/ .ci.yaml {,.}evergreen.yml {,.}jitpack.yml .cloudbuild/ .lgtm.yml "
          ".vela.y{,a}ml .agola/ .onedev-buildspec.yml .space.kts .concourse/ *.gocd.yaml",
          "the CI service", CI, own=True),
    ToolFile("azure-pipelines{,-*,.*}.y{,a}ml .azure-pipelines/ .azuredevops/ .pipelines/ .vsts-ci.yml .ado/",
          "Azure Pipelines", CI, own=True),
    ToolFile("bitbucket-pipelines.yml", "Bitbucket", CI, own=True),
    ToolFile("Jenkinsfile Jenkinsfile.* *.jenkinsfile .jenkins/", "Jenkins", CI, own=True),
    ToolFile("{,.}zuul.yaml {,.}zuul.d/ .tekton/ .prow/ .prow.yaml .build.yml .builds/ .packit.y{,a}ml .copr/ "
          "ci_scripts/ci_*.sh", "the CI service", CI, own=True),
    ToolFile("buildspec.y{,a}ml cloudbuild.{yaml,yml,json} amplify.yml netlify.toml vercel.json render.yaml "
          ".readthedocs.y{,a}ml readthedocs.yml {.binder,binder}/{postBuild,start} heroku.yml "
          "apprunner.yaml .ebextensions/ "
          ".platform/ .platform.app.yaml .upsun/ .s2i/ .do/ .deployment", "the hosting service",
          "builds by it when the repository is pushed", own=True),
    # Python
    ToolFile("pyvenv.cfg", "Python", "uses the installation that it names, as do editors that look for one",
          "GHSA-p9g2-cr55-cw9c", removable=True),
    ToolFile("{.venv,venv,.virtualenv,virtualenv,.env,env,.tox/*,.nox/*}/{bin,Scripts}/ "
          "bin/activate{,.csh,.fish,.nu,.ps1,_this.py} bin/{python,python3,python3.*,pip,pip3}", "editors",
          "start it to find out what is installed, and shells run it by name", "GHSA-p9g2-cr55-cw9c",
          removable=True),
    ToolFile("{_opam,.nodeenv}/{bin,Scripts}/", "the shell",
          "finds programs there first when a hook of opam's or nodeenv's has entered it", removable=True),
    ToolFile("LocalValetDriver.php", "Laravel Valet", "runs it when the site is next served", own=True),
    ToolFile("{.venv,venv,env}/pip.conf", "pip", "fetches packages where it says", own=True, removable=True),
    ToolFile(".pip/ .config/{pip,uv}/ .pypirc .condarc .mambarc uv.toml poetry.toml "
          "{,.}pdm.toml .pdm-python", "Python's installers", "fetch packages and interpreters where it says",
          own=True),
    ToolFile("{site,dist}-packages/*.{pth,egg-link} {site,dist}-packages/{__editable__,_virtualenv}*.py "
          "{site,dist}-packages/_distutils_hack/ "
          "sitecustomize.py usercustomize.py", "Python", START, removable=True),
    ToolFile("*.py{c,o}", "Python", "imports it where there is no source, and you cannot read what it does",
          removable=True),
    ToolFile(".pdbrc .pdbrc.py .pythonrc .pythonrc.py .pystartup .ipython/ .jupyter/ .config/{ipython,jupyter,"
          "matplotlib,ptpython}/ profile_default/startup/ ipython_config.py ipython_kernel_config.py",
          "Python's shells and debuggers", START, "CVE-2022-21699"),
    # JavaScript
    ToolFile("node_modules/.bin/ node_modules/.hooks/ vendor/bin/", "npm scripts, editors and shells",
          "run what is in it by name", removable=True),
    ToolFile(".npmrc .yarnrc .yarnrc.y{,a}ml {,.}bunfig.toml .corepack.env", "the package manager",
          "takes registries, preloaded code and the programs it runs from it", own=True),
    ToolFile(".yarn/{releases,plugins,sdks,versions}/ .pnp.{cjs,js,loader.mjs,data.json} "
          "{,.}pnpmfile.{cjs,mjs,js}",
          "the package manager", "runs it in place of itself, or before every package", own=True),
    # Ruby, R, and other languages with start-up files
    ToolFile(".irbrc .pryrc .rdbgrc .byebugrc .gemrc .bundle/config .bundle/plugin/ .rspec .rspec-local",
          "Ruby's tools",
          "run it, or load what it names, when they start"),
    ToolFile(".Rprofile .Renviron Rprofile.site Renviron.site .RData renv/activate.R packrat/init.R "
          ".radian_profile", "R",
          START),
    ToolFile(".ghci .ghc/ .cabal/config .stack/config.yaml", "GHC", START),
    ToolFile(".ocamlinit .utoprc .config/utop/ .opam/", "OCaml", START),
    ToolFile(".iex.exs .erlang", "Erlang and Elixir", START),
    ToolFile(".julia/config/ .swiplrc .config/swi-prolog/ .sbclrc .clisprc .eclrc .ccl-init.lisp .guile "
          ".racketrc "
          ".tclshrc .wishrc .expect.rc .octaverc .scilab .gnuplot .perldb .re.pl/ .coqrc", "the interpreter",
          START),
    ToolFile("startup.m finish.m pathdef.m {,.}rootlogon.C .rootrc rootalias.C profile.do sysprofile.do "
          "autoexec.sas maxima-init.mac .gprc", "the statistics or mathematics program",
          "runs it when it is started in the directory", own=True),
    ToolFile(".psysh.php .config/psysh/", "PsySH", START, "CVE-2026-25129"),
    ToolFile(".user.ini .htaccess php.ini .composer/", "the web server and PHP",
          "obey it for the directory, code to be loaded first among it", own=True),
    ToolFile(".latexmkrc latexmkrc texmf.cnf", "TeX",
          "runs it as code, also from an editor that builds on saving"),
    # Debuggers
    ToolFile(".gdbinit .gdbearlyinit .config/gdb/ *-gdb.{py,gdb,scm} .lldbinit .lldbinit-* .cgdb/ .radare2rc "
          ".rizinrc .jdbrc jdb.ini .delverc .dlv/", "the debugger", START),
    ToolFile(".valgrindrc", "Valgrind", START, "CVE-2008-4865"),
    # Build tools' own configuration
    ToolFile(".cargo/config .cargo/config.toml .cargo/credentials .cargo/credentials.toml", "cargo",
          "runs the wrappers, linkers and aliases that it names, also from an editor"),
    ToolFile(".config/go/", "go", "takes flags from it for every build, a program to run among them"),
    ToolFile(".mvn/ .mavenrc .m2/settings.xml", "Maven", "loads extensions and options from it", own=True),
    ToolFile("gradle/wrapper/ .gradle/init.gradle{,.kts} .gradle/init.d/ "
          ".gradle/{gradle,config}.properties", "Gradle",
          "runs it in place of itself, or before every build", own=True),
    ToolFile(".sbtopts .jvmopts .sbtrc .sbt/ .mill-jvm-opts .mill-opts .lein/ .clojure/",
          "the JVM's build tools", "take options and plugins from it for every build", own=True),
    ToolFile("nuget.config global.json dotnet-tools.json Directory.Build.rsp MSBuild.rsp", "dotnet",
          "takes packages, its own version and options from it", own=True),
    ToolFile("tools/bazel tools/bazel.rc {,user}.bazelrc .bazelrc.* .bazelversion .bazeliskrc", "Bazel",
          "runs it in place of itself, or takes options from it for every build", own=True),
    ToolFile(".buckconfig .buckconfig.local .buckconfig.d/ .plzconfig .plzconfig.* .pants.rc .pants.bootstrap",
          "the build tool", "takes options from it for every build", own=True),
    ToolFile("CMakeUserPresets.json cmake-kits.json cmake-variants.{yaml,json}", "CMake",
          "takes compilers and commands from it, also when an editor opens the project", own=True),
    ToolFile("invoke.{yaml,yml,json}", "Invoke",
          "takes the shell that runs its tasks from it, and where they are", own=True),
    ToolFile(".actrc", "act", "takes options from it for every run, directories of the host to mount among them",
          own=True),
    ToolFile(".turbo/config.json", "Turborepo", "fetches the results of builds where it says, and uses them",
          own=True),
    ToolFile("ansible.cfg .ansible.cfg .ansible/", "Ansible",
          "loads the plugins that it names from the directory"),
    ToolFile(".terraform/ override.tf *_override.tf", "Terraform",
          "runs the providers in it, or lays it over the project's own files", own=True, removable=True),
)

RUNS = (
    ToolFile("conftest.py {,.}pytest.{ini,toml} tox.ini noxfile.py .coveragerc {,.}nose.cfg .noserc",
          "pytest, tox or nox",
          "runs it before the tests"),
    ToolFile("*.so", "Python, or the linker,", "loads it as code, Python in place of a source of that name"),
    ToolFile("setup.py setup.cfg pyproject.toml MANIFEST.in hatch.toml hatch_build.py Pipfile pixi.toml "
          "requirements*.txt constraints*.txt requirements/*.txt environment.y{,a}ml "
          "{uv,poetry,pdm,Pipfile}.lock "
          "pylock{,.*}.toml", "pip",
          "runs it, or fetches what it names, at the next install"),
    ToolFile("tasks.py dodo.py fabfile.py manage.py wsgi.py asgi.py gunicorn.conf.py celeryconfig.py "
          "matplotlibrc "
          "jupyter_*config.{py,json} mkdocs.y{,a}ml alembic.ini .streamlit/** .chainlit/** prefect.yaml "
          "docs/conf.py doc/conf.py docs/source/conf.py", "Python",
          "runs it at the command that it belongs to"),
    ToolFile("{,.}pylintrc .pylintrc.toml .flake8 {,.}mypy.ini .pyre_configuration pyrightconfig.json "
          "pyrefly.toml ty.toml .sqlfluff {ts,js}config{,.*}.json .oxlintrc.json {,.}dprint.json{,c} "
          ".vale.ini "
          ".clangd .ccls compile_commands.json compile_flags.txt .mega-linter.yml .ctags .ctags.d/**",
          "the linter", LINT),
    ToolFile("package.json npm-shrinkwrap.json package-lock.json yarn.lock pnpm-lock.yaml pnpm-workspace.yaml "
          "bun.lock lerna.json nx.json turbo.json rush.json deno.json{,c} project.json", "npm",
          "runs the scripts in it, or fetches what it names, at the next install or run"),
    ToolFile("*.config.{js,cjs,mjs,ts,cts,mts,jsx,tsx} *.conf.{js,cjs,mjs,ts} .*rc.{js,cjs,mjs,ts,cts,mts} "
          "webpack.*.js truffle-config.js .storybook/** .vuepress/config.* .vitepress/config.*",
          "the tool of that name", "runs it as code at the next build, test or check, also from an editor"),
    ToolFile("{gulp,grunt,jake,plop}file{,.*}.{js,cjs,mjs,ts} {gulp,grunt,jake}file ember-cli-build.js "
          "angular.json nodemon.json wrangler.{toml,json,jsonc} firebase.json serverless.{yml,yaml,ts,js} "
          "cdk.json tauri.conf.json{,5} Tauri.toml gemini-extension.json _config.y{,a}ml",
          "the tool of that name", "runs it, or the commands in it"),
    ToolFile(".{babel,eslint,prettier,stylelint,postcss,swc,mocha,nyc,tap,c8,commitlint,release,version}rc "
          ".{cz,parcel,nuxt,graphql,yo-,remark,textlint,jest,browserslist,nodemon,ncu}rc "
          ".{babel,eslint,prettier,stylelint,postcss,mocha,nyc,commitlint,"
          "release,version,yo-,graphql,remark,textlint}rc.{json,json5,yml,yaml,toml} .markdownlint-cli2.* "
          ".markdownlint.{cjs,mjs} "
          ".{c8,nyc,ncu,npmpackagejsonlint}rc.json jest.config.json {,.}xo-config.json "
          ".release-it.{json,yaml,yml,toml} "
          ".babel-plugin-macrosrc{,.*} .vscode-test.{js,cjs,mjs} pm2.json {,.}cz.{json,toml,yaml} "
          ".changeset/config.json",
          "the tool of that name", LINT),
    ToolFile("Gemfile Gemfile.lock gems.rb *.gemspec Rakefile *.rake Guardfile Capfile Vagrantfile Berksfile "
          "Thorfile *.thor Brewfile Podfile *.podspec Fastfile Dangerfile Puppetfile config.ru .simplecov "
          ".rubocop.yml .rubocop .mdlrc Steepfile .watchr bin/{rails,rake,spring} config/boot.rb "
          ".solargraph.yml "
          ".yardopts", "Ruby's tools", "run it as code, or load what it names"),
    ToolFile(".chef/{knife,config}.rb .reviewboardrc wp-cli{,.local}.y{,a}ml", "knife, rbt and wp",
          "run it as code, or load what it names"),
    ToolFile("Makefile makefile GNUmakefile Makefile.* *.mk *.mak justfile .justfile Taskfile{,.dist}.y{,a}ml "
          "SConstruct SConscript site_scons/** wscript waf meson.build *.wrap build.ninja Earthfile Tiltfile "
          "Snakefile xmake.lua premake*.lua Jamroot Jamfile BSDmakefile Makevars Makevars.* "
          "meson_options.txt meson.options bacon.toml Trunk.toml "
          "Kbuild Kconfig Tupfile Jamrules .taskrc.y{,a}ml maskfile.md debian/rules *.spec PKGBUILD "
          "APKBUILD *.ebuild "
          "snapcraft.yaml", "make, or the tool of that name",
          BUILD),
    ToolFile("CMakeLists.txt CMakePresets.json *.cmake configure configure.{ac,in} autogen.sh bootstrap.sh "
          "Makefile.{am,in} *.m4 *.pro *.pri", "CMake, autotools or qmake", BUILD),
    ToolFile("build.rs Cargo.toml Cargo.lock .config/nextest.toml", "cargo",
          "builds and runs it at the next build, also from an editor"),
    ToolFile("go.mod go.work magefile.go .golangci.{yml,yaml,toml,json} .custom-gcl.yml .air.toml", "go",
          "fetches or runs what it names at the next build"),
    ToolFile("build.gradle{,.kts} settings.gradle{,.kts} *.gradle{,.kts} gradle.properties gradlew gradlew.bat "
          "buildSrc/** mvnw mvnw.cmd pom.xml build.xml build.sbt project/*.{sbt,scala,properties} build.mill "
          "build.sc mill project.clj deps.edn profiles.clj shadow-cljs.edn bb.edn "
          "gradle/gradle-daemon-jvm.properties .scalafix.conf .scalafmt.conf jbang-catalog.json .jbang/** "
          "ivysettings.xml "
          ".groovylintrc.json", "the JVM's build tools",
          BUILD),
    ToolFile("*.{cs,vb,fs,vcx}proj *.sln *.slnx *.{props,targets} Directory.Build.{props,targets} *.nuspec "
          "packages.config web.config paket.dependencies paket.lock *.runsettings .fake/** build.fsx",
          "dotnet",
          "runs the targets in it at the next build, also from an editor"),
    ToolFile("mix.exs .formatter.exs .credo.exs config/*.exs rebar.config{,.script} erlang.mk",
          "Erlang and Elixir",
          BUILD),
    ToolFile("Setup.hs Setup.lhs cabal.project{,.local} *.cabal stack.yaml package.yaml dune dune-project "
          "dune-workspace *.opam", "GHC or OCaml", BUILD),
    ToolFile("Package.swift *.pbxproj *.xcscheme .xcode.env .xcode.env.local build.zig build.zig.zon "
          "config.nims nim.cfg "
          "*.nimble lakefile.{lean,toml} shard.yml dub.{json,sdl} pubspec{,_overrides}.yaml "
          "analysis_options.yaml build.yaml "
          "melos.yaml .dart_tool/package_config.json .packages Package.resolved Mintfile Cartfile "
          "project.yml Tuist/** "
          ".sourcery.yml {,Julia}Manifest{,-v*}.toml JuliaProject.toml LocalPreferences.toml Cask Eask Eldev "
          "_targets.R _bookdown.yml _quarto.yml _extensions/** *.Rproj Tectonic.toml "
          "{.araraconfig,arararc}.yaml book.toml "
          "hugo.{toml,yaml,yml,json} nextflow.config .nextflow/plugins/** "
          "Project.toml _CoqProject *.asd *.rockspec .busted .luacheckrc .luacov .lintr Makefile.PL Build.PL "
          "cpanfile dist.ini .proverc", "the language's build tool", BUILD),
    ToolFile("composer.json composer.lock phpunit.xml{,.dist} phpstan.neon{,.dist} psalm.xml rector.php "
          ".php-cs-fixer{,.dist}.php .php_cs{,.dist} {,.}phpcs.xml{,.dist} .phan/** artisan", "PHP's tools",
          LINT),
    ToolFile("Dockerfile Dockerfile.* *.Dockerfile Containerfile {docker-,}compose{,.*,-*}.y{,a}ml "
          "docker-bake.* "
          "skaffold.yaml devspace.yaml {,.}garden.y{,a}ml *.garden.yml werf.yaml tilt_config.json "
          "{,.}ko.yaml .dagger/** "
          "{,.}mprocs.yaml .tmuxp.yaml .smug.yml process-compose{,.*}.y{,a}ml .overmind.env .foreman "
          "okteto.y{,a}ml .lando.yml .lando.*.yml .ddev/** Procfile app.json fly.toml "
          "railway.*",
          "docker, or the platform", "runs the commands in it at the next build or start"),
    ToolFile("*.tf *.tofu *.tf.json *.auto.tfvars terraform.tfvars terragrunt.hcl .terraform.lock.hcl "
          "Pulumi.yaml "
          "kustomization.yaml Chart.yaml", "Terraform, or the tool of that name",
          "fetches and runs what it names at the next plan"),
    ToolFile("WORKSPACE WORKSPACE.bazel MODULE.bazel BUILD BUILD.bazel *.bzl BUCK TARGETS pants.toml .gn *.gn "
          "*.gni",
          "Bazel, or the tool of that name", BUILD, exact=True),
    ToolFile("*.nix guix.scm manifest.scm channels.scm flake.lock devenv.yaml devbox.json",
          "nix", "builds and runs it at the next shell"),
    ToolFile(".tool-versions mise.lock aqua.yaml .moon/**", "mise, asdf or aqua",
          "install the tools that it names"),
    ToolFile(".env.{local,development,production,test,staging,vault,keys} .env.*.local .flaskenv",
          "the project's own tools",
          "load variables from it", own=True),
    ToolFile(".gitmodules .hgsub .gitreview west.yml", "git",
          "fetches repositories from where it says at the next update", "CVE-2025-48384"),
    ToolFile(".git/HEAD .git/packed-refs .git/refs/** .git/worktrees/*/HEAD .git/modules/**/HEAD", "git",
          "uses commits that were made inside at the next checkout, merge or push; files in them may be of "
          "those that are held back here"),
    ToolFile(".run/*.run.xml nbproject/** *.desktop .tmuxinator.yml .vimspector.json Session.vim .mc.menu",
          "the editor or the desktop", "runs it when you choose it"),
    ToolFile(".goreleaser.y{,a}ml cliff.toml .releaserc.* dagger.json action.y{,a}ml dvc.yaml .gitlint "
          ".arcconfig "
          ".arclint foundry.toml atlas.hcl buf.gen.yaml sqlc.{yaml,yml,json} dbt_project.yml .gh-dash.yml "
          "{,.}cagent.yaml "
          ".pre-commit-hooks.yaml", "the tool of that name", "runs the commands in it"),
)
# fmt: on

#: Directories that Python looks into first when a script in them is run.
BESIDE_SCRIPTS = ("", "src", "scripts", "script", "tools", "bin", "tests", "test", "app", "lib", "examples")
SHADOW = ToolFile(
    "/MODULE.py", "Python", "imports it in place of its own module of that name, in whatever runs beside it"
)
#: Modules that projects have of their own everywhere, and that nothing else imports by that name.
NOT_SHADOWED = ("test", "tests", "this", "antigravity", "idlelib", "turtledemo", "lib2to3")
#: Modules beside those of Python itself that its tools import by name.
INSTALLERS = ("pip", "setuptools", "pkg_resources", "wheel", "pytest", "pluggy")
